#pragma once

#include <cstdint>

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace cleave::kernels {

/// The order that one parallel region of OpenMP makes. GCC's library makes it by futexes, which ThreadSanitizer does
/// not see; without sanitizer this is nothing.
class Fence {
 public:
  void open() {
    release(&begin_);
  }
  void enter() {
    acquire(&begin_);
  }
  /// All of the team wait for each other.
  void barrier() {
    release(&middle_);
#pragma omp barrier
    acquire(&middle_);
  }
  void leave() {
    release(&end_);
  }
  void close() {
    acquire(&end_);
  }

 private:
#ifdef __SANITIZE_THREAD__
  static void acquire(char* at) {
    __tsan_acquire(at);
  }
  static void release(char* at) {
    __tsan_release(at);
  }
#else
  static void acquire(char*) {}
  static void release(char*) {}
#endif
  char begin_ = 0, middle_ = 0, end_ = 0;
};

/// Runs body(fence) on every thread of the calling thread's OpenMP team, and returns when all have ended. Loops in it
/// share their work by `#pragma omp for ... nowait`. A single item to share is left to the calling thread, which spares
/// the waking of the others.
template <typename Body>
void on_team(const Body& body, int64_t items = 2) {
  Fence fence;
  fence.open();
#pragma omp parallel if (items > 1)
  {
    fence.enter();
    body(fence);
    fence.leave();
  }
  fence.close();
}

/// Runs body(i) for 0 <= i < count, in one run of neighbours per thread.
template <typename Body>
void on_team_for(int64_t count, const Body& body) {
  on_team(
      [&](Fence&) {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; ++i) {
          body(i);
        }
      },
      count);
}

} // namespace cleave::kernels
