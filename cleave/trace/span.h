#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace cleave::trace {

/// One call of one program, in nanoseconds of std::chrono::steady_clock.
struct Span {
  std::string site;
  std::string unit;
  int64_t begin_ns;
  int64_t end_ns;
  int64_t rows; ///< tokens
};

/// Starts or stops keeping spans. Off by default; while off a call pays one atomic load.
void enable(bool on);
bool enabled();
/// Keeps the newest 65536 spans.
void record(Span span);
/// Returns the kept spans in order of their end and forgets them.
std::vector<Span> take();
int64_t now_ns();

} // namespace cleave::trace
