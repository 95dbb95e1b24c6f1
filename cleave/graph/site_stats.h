#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace cleave {

/// What a site did, counted when the work ran, not when the graph was built.
struct SiteStats {
  std::string site;
  std::atomic<uint64_t> engaged{0};     ///< unit calls finished, rescued ones included
  std::atomic<uint64_t> rescued{0};     ///< unit calls that failed and were finished by the reference
  std::atomic<uint64_t> original{0};    ///< calls that took the original module's ops
  std::atomic<uint64_t> wrong_dtype{0}; ///< those of them that were long enough, but of a dtype no program accepts
  std::atomic<bool> unprobed{false};    ///< the next unit call is to measure `error`
  std::atomic<float> error{-1};         ///< of a unit's products, relative to the reference's; negative: not measured
};

} // namespace cleave
