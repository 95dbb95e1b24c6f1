#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cleave/graph/unit_call.h"
#include "cleave/site/shares.h"

namespace cleave {

struct SiteOptions {
  std::string name = {};                         ///< for reports, such as "layers.0.self_attn.q_proj+k_proj+v_proj"
  int tile = 512;                                ///< tokens that programs are tuned for
  int min_rows = 192;                            ///< calls with fewer tokens run the original ops
  int align = 1;                                 ///< rows per unit are multiples of this where possible
  std::optional<mx::Dtype> dtype = std::nullopt; ///< of the activations expected, when the weights do not tell
  Precision precision = Precision::exact;        ///< of the partners; main is exact
};

/// What a site holds and why; plain data.
struct SiteReport {
  struct Part {
    std::string unit;
    std::vector<int> rows;  ///< per member of a linear group; mlp: one number, of the intermediate dimension
    size_t bytes;           ///< held beside the model's own arrays
    std::string arithmetic; ///< of its products; main's is mlx's own
  };
  std::string name;
  SiteKind kind;
  int k;
  std::vector<int> n;
  std::string format;                ///< of the weights
  std::vector<Part> parts;           ///< main first; units without rows are left out
  std::vector<std::string> refusals; ///< "unit: sentence"
  bool splits;                       ///< whether any partner has rows
};

/// A place in a model where work is split. Immutable but for set_min_rows, callable from any thread. A call builds lazy
/// graph nodes only.
class Site {
 public:
  virtual ~Site() = default;
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;

  /// x: [..., k] -> the outputs of the original module(s), split when engages(x), else by the original ops.
  std::vector<mx::array> operator()(const mx::array& x) const;
  /// Whether a call with x is split: enough rows, a dtype the programs accept, no unit switched off.
  bool engages(const mx::array& x) const;
  /// Calls with fewer tokens run the original ops from now on. Not while another thread calls the site.
  void set_min_rows(int rows);
  /// The unsplit ops on main.
  virtual std::vector<mx::array> original(const mx::array& x) const = 0;

  const SiteReport& report() const {
    return report_;
  }
  const SiteStats& stats() const {
    return *stats_;
  }
  void count_original() const {
    ++stats_->original;
  }

 protected:
  /// A partner's part.
  struct Part {
    SharedProgram call;
    std::vector<int> rows;
  };
  /// What one partner is to compile, and from which weights.
  struct Request {
    ProgramSpec spec;
    std::vector<LinearWeight> weights;
  };

  Site(const SiteOptions& options, SiteReport report);
  /// Cuts rows and compiles every partner's part; a unit that refuses leaves its rows to main. Called once by the
  /// constructor of the concrete site.
  void build(const std::vector<UnitShare>& shares);
  /// Rows per member for each share.
  virtual std::vector<std::vector<int>> cut(const std::vector<double>& shares) const = 0;
  /// The request for rows [begin_i, begin_i + rows_i) of each member; `alone` when no other unit has rows.
  virtual Request request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const = 0;
  virtual std::vector<mx::array> split(const mx::array& x) const = 0;

  SiteOptions options_;
  SiteReport report_;
  std::shared_ptr<SiteStats> stats_;
  std::vector<int> main_rows_; ///< per member
  std::vector<Part> parts_;

 private:
  std::optional<size_t> try_build(const std::vector<UnitShare>& shares, const std::vector<double>& fractions);
};

} // namespace cleave
