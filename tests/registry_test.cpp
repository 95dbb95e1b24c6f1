#include "cleave/unit/registry.h"

#include <unistd.h>

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "cleave/site/linear_group.h"
#include "cleave/units/cpu/cores.h"
#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

template <typename Error>
void refused(const std::string& name, const std::string& reason) {
  SCOPED_TRACE(name);
  EXPECT_THAT(
      [&] { make_unit(name); },
      ThrowsMessage<Error>(AllOf(StartsWith("[make_unit] got "), HasSubstr("'" + name + "'"), HasSubstr(reason))));
}

TEST(MakeUnit, MakesEveryFamily) {
  for (const std::string name : {"cpu", "mlx-cpu", "reference", "fault:3"}) {
    auto a = make_unit(name), b = make_unit(name);
    EXPECT_EQ(a->name(), name);
    EXPECT_NE(a, b);
    EXPECT_EQ(a->stream(), b->stream()) << "mlx never ends a stream's thread";
    EXPECT_FALSE(a->description().empty());
    EXPECT_FALSE(a->failed());
  }
  EXPECT_NE(unit("reference")->stream(), unit("mlx-cpu")->stream());
  if (unit("cpu:0") && unit("cpu:1")) {
    EXPECT_NE(unit("cpu:0")->stream(), unit("cpu:1")->stream());
  }
}

TEST(MakeUnit, NamesWhatItDoesNotKnow) {
  for (const std::string name : {"ane9", "", " cpu", "CPU", "cpux", ":0", "cpu 0"}) {
    refused<std::invalid_argument>(name, "knows only: main, cpu, mlx-cpu, reference, fault");
  }
}

TEST(MakeUnit, MainIsNoPartner) {
  refused<std::invalid_argument>("main", "MLX itself runs on");
  EXPECT_TRUE(is_main_unit("main"));
  EXPECT_FALSE(is_main_unit("cpu"));
}

TEST(MakeUnit, NamesOptionsThatDoNotParse) {
  refused<std::invalid_argument>("cpu:", "after the colon");
  refused<std::invalid_argument>("reference:", "after the colon");
  for (const std::string options :
       {"x", "1-0", "-1", "0-", "0,,1", ",0", "0,", "0-1-2", "0x", "0 ", " 0", "99999999999999", "0-99999", "0:1"}) {
    refused<std::invalid_argument>("cpu:" + options, "needs cores such as");
  }
  refused<std::invalid_argument>("reference:1", "without options");
  for (const std::string name : {"fault", "fault:-1", "fault:x", "fault:1x"}) {
    refused<std::invalid_argument>(name, "fault:N");
  }
  refused<std::runtime_error>("mlx-cpu:0", "cannot be pinned");
}

TEST(MakeUnit, NamesACoreThatTheProcessDoesNotHave) {
  if (!unit("cpu:" + std::to_string(allowed_cores()[0]))) {
    GTEST_SKIP() << "this system cannot pin threads";
  }
  refused<std::runtime_error>("cpu:4000", "core 4000");
  refused<std::runtime_error>("cpu:" + std::to_string(allowed_cores()[0]) + ",4000", "core 4000");
}

TEST(MakeUnit, AvailableUnitsSaysWhatEveryFamilyIs) {
  std::vector<std::string> names;
  for (const auto& a : available_units()) {
    names.push_back(a.name);
    EXPECT_TRUE(a.available) << a.text;
    EXPECT_FALSE(a.text.empty());
  }
  EXPECT_THAT(names, testing::ElementsAre("cpu", "mlx-cpu", "reference"));
}

/// Of each thread of this process: the cores it may run on, as the kernel writes them.
std::map<std::string, std::string> threads() {
  std::map<std::string, std::string> out;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    const std::string key = "Cpus_allowed_list:\t";
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with(key)) {
        out[task.path().filename()] = line.substr(key.size());
      }
    }
  }
  return out;
}

/// The cores of the threads that a unit has after a call: its stream's, and those of its OpenMP team. The call comes
/// from a new thread, since streams belong to threads.
std::vector<std::string> threads_of(const std::string& name) {
  Random random(61);
  auto x = normal(random, {64, 32});
  auto w = make_weight(random, {}, 64, 32, true);
  LinearGroup site({w}, {{nullptr, 0.1}, {unit(name), 0.9}}, {.min_rows = 1});
  std::vector<std::string> cores;
  std::thread([&] {
    mx::eval(mx::add(mx::array(1), mx::array(2))); // starts this thread's main stream
    const auto before = threads();
    mx::eval(site(x));
    for (const auto& [id, list] : threads()) {
      if (!before.contains(id)) {
        cores.push_back(list);
      }
    }
  }).join();
  EXPECT_EQ(site.stats().engaged, 1u);
  EXPECT_EQ(site.stats().rescued, 0u);
  return cores;
}

// Also run with OMP_NUM_THREADS set to 1 and to 7, see CMakeLists.txt.
class CpuUnitThreads : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/proc/self/task") || !HasCore(0)) {
      GTEST_SKIP() << "this system cannot pin threads, or this build has no oneDNN";
    }
  }
  static bool HasCore(int core) {
    return unit("cpu:" + std::to_string(core)) != nullptr;
  }
};

TEST_F(CpuUnitThreads, OneCoreIsOneThreadOnThatCore) {
  for (int core : {0, 1}) {
    if (HasCore(core)) {
      EXPECT_THAT(threads_of("cpu:" + std::to_string(core)), testing::ElementsAre(std::to_string(core)));
    }
  }
}

TEST_F(CpuUnitThreads, AGroupHasAThreadForEachOfItsCores) {
  if (!HasCore(1)) {
    GTEST_SKIP() << "this process may not run on cores 0 and 1";
  }
  EXPECT_THAT(threads_of("cpu:0-1"), AllOf(testing::SizeIs(2), Each("0-1")));
}

TEST_F(CpuUnitThreads, TheWholeCpuHasAThreadForEachAllowedCore) {
  const auto all = threads().at(std::to_string(getpid())); // a lower number may be a pinned thread
  EXPECT_THAT(threads_of("cpu"), AllOf(testing::SizeIs(allowed_cores().size()), Each(all)));
}

TEST_F(CpuUnitThreads, PinningAUnitLeavesTheCallerWhereItWas) {
  const auto before = allowed_cores();
  threads_of("cpu:0");
  EXPECT_EQ(allowed_cores(), before);
}

} // namespace
} // namespace cleave::test
