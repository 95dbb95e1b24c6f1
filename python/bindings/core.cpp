// The Python extension cleave._core: units, sites and spans, nothing of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "cleave/ops/ops.h"
#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"
#include "cleave/trace/span.h"
#include "cleave/unit/registry.h"
#include "mlx/version.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace cleave;

namespace {

nb::dict to_dict(const SiteReport& r) {
  nb::dict d;
  nb::list parts;
  for (const auto& p : r.parts) {
    nb::dict part;
    part["unit"] = p.unit;
    part["rows"] = p.rows;
    part["bytes"] = p.bytes;
    part["arithmetic"] = p.arithmetic;
    parts.append(part);
  }
  d["name"] = r.name;
  d["kind"] = to_string(r.kind);
  d["k"] = r.k;
  d["n"] = r.n;
  d["format"] = r.format;
  d["parts"] = parts;
  d["refusals"] = r.refusals;
  d["splits"] = r.splits;
  return d;
}

/// The arrays of a module at the time its site was made; tells whether they still are the module's.
class Fingerprint {
 public:
  explicit Fingerprint(const nb::dict& module) {
    for (size_t i = 0; i < names.size(); ++i) {
      if (auto a = find(module, i)) {
        arrays_[i] = *a;
      }
    }
  }

  bool matches(const nb::dict& module) const {
    for (size_t i = 0; i < names.size(); ++i) {
      const auto* now = find(module, i);
      if (!now != !arrays_[i] || (now && now->id() != arrays_[i]->id())) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::array<const char*, 4> names{"weight", "scales", "biases", "bias"};

  static const mx::array* find(const nb::dict& module, size_t i) {
    static PyObject* const keys[] = {
        PyUnicode_InternFromString(names[0]), PyUnicode_InternFromString(names[1]),
        PyUnicode_InternFromString(names[2]), PyUnicode_InternFromString(names[3])};
    PyObject* value = PyDict_GetItemWithError(module.ptr(), keys[i]); // borrowed
    if (!value || value == Py_None) {
      return nullptr;
    }
    return nb::inst_ptr<mx::array>(value);
  }

  std::array<std::optional<mx::array>, 4> arrays_;
};

} // namespace

NB_MODULE(_core, m) {
  m.attr("__version__") = CLEAVE_VERSION;
  m.attr("mlx_version") = CLEAVE_MLX_VERSION;
  m.attr("nanobind_version") = CLEAVE_NANOBIND_VERSION;

  nb::class_<LinearWeight>(m, "LinearWeight")
      .def(
          "__init__",
          [](LinearWeight* self, mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
             std::optional<mx::array> bias, int group_size, int bits,
             std::string mode) { new (self) LinearWeight{weight, scales, biases, bias, group_size, bits, mode}; },
          "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "bias"_a = nb::none(), "group_size"_a = 0,
          "bits"_a = 0, "mode"_a = "")
      .def_prop_ro("n", &LinearWeight::n)
      .def_prop_ro("k", &LinearWeight::k)
      .def_prop_ro("format", &LinearWeight::format)
      .def("activation_dtype", &LinearWeight::activation_dtype)
      .def("rows", &LinearWeight::rows, "begin"_a, "end"_a)
      .def("columns", &LinearWeight::columns, "begin"_a, "end"_a)
      .def(
          "linear", [](const LinearWeight& w, const mx::array& x) { return w.linear(x); }, "x"_a)
      .def(
          "unpack",
          [](const LinearWeight& w) {
            w.check("unpack");
            std::vector<float> values(size_t(w.n()) * w.k());
            for (int row = 0; row < w.n(); ++row) {
              unpack_row(w, row, values.data() + size_t(row) * w.k());
            }
            return mx::array(values.data(), {w.n(), w.k()}, mx::float32);
          },
          "The weight as float32 [n, k], decoded by cleave's own code.");

  nb::class_<Unit>(m, "Unit")
      .def_prop_ro("name", &Unit::name)
      .def_prop_ro("description", &Unit::description)
      .def_prop_ro("failed", &Unit::failed)
      .def_prop_ro("failures", &Unit::failures)
      .def_prop_ro("failure", &Unit::failure);

  nb::class_<Site>(m, "Site")
      .def("__call__", &Site::operator(), "x"_a, "The original outputs for x [..., k], split when engages(x).")
      .def("engages", &Site::engages, "x"_a, "Whether a call with x would be split.")
      .def("original", &Site::original, "x"_a)
      .def("set_min_rows", &Site::set_min_rows, "rows"_a)
      .def("count_original", &Site::count_original)
      .def("report", [](const Site& s) { return to_dict(s.report()); })
      .def_prop_ro("splits", [](const Site& s) { return s.report().splits; })
      .def_prop_ro("engaged", [](const Site& s) { return s.stats().engaged.load(); })
      .def_prop_ro("rescued", [](const Site& s) { return s.stats().rescued.load(); })
      .def_prop_ro("wrong_dtype", [](const Site& s) { return s.stats().wrong_dtype.load(); })
      .def_prop_ro(
          "error",
          [](const Site& s) {
            const float error = s.stats().error;
            return error < 0 ? std::nullopt : std::optional(error);
          },
          "Relative error of a unit's products beside the reference's in the first call; None for exact ones.")
      .def_prop_ro("originals", [](const Site& s) { return s.stats().original.load(); });

  nb::class_<LinearGroup, Site>(m, "LinearGroup")
      .def(
          "__init__",
          [](LinearGroup* self, std::vector<LinearWeight> members, const Shares& shares, const std::string& name,
             int tile, int min_rows, int align, std::optional<mx::Dtype> dtype, const std::string& precision) {
            new (self) LinearGroup(
                std::move(members), to_shares(shares),
                {name, tile, min_rows, align, dtype, precision_from_string(precision)});
          },
          "members"_a, "shares"_a, "name"_a = "", "tile"_a = 512, "min_rows"_a = 192, "align"_a = 1,
          "dtype"_a = nb::none(), "precision"_a = "exact", nb::call_guard<nb::gil_scoped_release>())
      .def("main_rows_difference", &LinearGroup::main_rows_difference, "tokens"_a);

  nb::class_<Mlp, Site>(m, "Mlp").def(
      "__init__",
      [](Mlp* self, LinearWeight gate, LinearWeight up, LinearWeight down, const std::string& activation,
         const Shares& shares, const std::string& name, int tile, int min_rows, int align,
         std::optional<mx::Dtype> dtype, const std::string& precision) {
        new (self)
            Mlp(std::move(gate), std::move(up), std::move(down), activation_from_string(activation), to_shares(shares),
                {name, tile, min_rows, align, dtype, precision_from_string(precision)});
      },
      "gate"_a, "up"_a, "down"_a, "activation"_a, "shares"_a, "name"_a = "", "tile"_a = 512, "min_rows"_a = 192,
      "align"_a = 1, "dtype"_a = nb::none(), "precision"_a = "exact", nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Fingerprint>(m, "Fingerprint").def(nb::init<nb::dict>()).def("matches", &Fingerprint::matches, "module"_a);

  nb::class_<trace::Span>(m, "Span")
      .def_ro("site", &trace::Span::site)
      .def_ro("unit", &trace::Span::unit)
      .def_ro("begin_ns", &trace::Span::begin_ns)
      .def_ro("end_ns", &trace::Span::end_ns)
      .def_ro("rows", &trace::Span::rows);

  nb::class_<Availability>(m, "Availability")
      .def_ro("name", &Availability::name)
      .def_ro("text", &Availability::text)
      .def_ro("available", &Availability::available);

  nb::class_<ops::Rope>(m, "Rope")
      .def(
          "__init__",
          [](ops::Rope* self, int dims, bool traditional, std::optional<float> base, float scale,
             const std::optional<mx::array>& freqs) {
            new (self) ops::Rope({dims, traditional, base, scale, freqs ? to_freqs(*freqs) : std::vector<float>{}});
          },
          "dims"_a, "traditional"_a, "base"_a.none(), "scale"_a, "freqs"_a.none())
      .def(
          "__call__", [](const ops::Rope& r, const mx::array& x, int offset) { return r(x, offset); }, "x"_a,
          "offset"_a);
  m.def(
      "ops_serve", [] { return ops::serves({}); }, "Whether cleave has kernels for the default device.");
  m.def(
      "rms_norm",
      [](const mx::array& x, const std::optional<mx::array>& w, float eps) { return ops::rms_norm(x, w, eps); }, "x"_a,
      "weight"_a.none(), "eps"_a);
  m.def(
      "attention",
      [](const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal) {
        return ops::attention(q, k, v, scale, causal);
      },
      "q"_a, "k"_a, "v"_a, "scale"_a, "causal"_a);

  m.def("make_unit", &make_unit, "name"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("is_main_unit", &is_main_unit, "name"_a);
  m.def("available_units", &available_units);
  m.def("automatic_units", [] {
    std::vector<std::string> names;
    for (const auto& entry : unit_table()) {
      if (entry.automatic) {
        names.push_back(entry.family);
      }
    }
    return names;
  });
  m.def(
      "check_shares", [](const Shares& shares) { check_shares(to_shares(shares)); }, "shares"_a);
  bind_models(m);
  m.def("same_array", [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); });
  m.def("trace_enable", &trace::enable, "on"_a);
  m.def("trace_take", &trace::take, "The spans kept since the last call, in order of their end.");
}
