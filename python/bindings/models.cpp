// Decoders and the reading and continuing of a text.
#include "cleave/models/session.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cleave {

void bind_models(nb::module_& m) {
  nb::class_<ModelConfig>(m, "ModelConfig")
      .def_ro("model_type", &ModelConfig::model_type)
      .def_ro("vocab", &ModelConfig::vocab)
      .def_ro("context", &ModelConfig::context)
      .def_ro("layers", &ModelConfig::layers)
      .def_ro("end_tokens", &ModelConfig::end_tokens);

  using Chooser = std::function<Shares(const std::string&, const LinearWeight&)>;
  nb::class_<Decoder>(m, "Decoder")
      .def_prop_ro("config", &Decoder::config)
      .def_prop_ro("nbytes", &Decoder::nbytes)
      .def_prop_ro("sites", [](const Decoder& d) {
        std::vector<std::shared_ptr<Site>> sites;
        for (const auto& site : d.sites()) { // Python knows no const; what it can call changes counters only
          sites.push_back(std::const_pointer_cast<Site>(site));
        }
        return sites;
      });
  m.def(
      "load_decoder",
      [](const std::string& path, const Chooser& shares, int tile, int min_rows, std::optional<bool> attention,
         const std::string& precision) {
        DecoderOptions options{{}, tile, min_rows, attention, precision_from_string(precision)};
        if (shares) {
          options.shares = [&](const std::string& site, const LinearWeight& weight) {
            return to_shares(shares(site, weight));
          };
        }
        return std::const_pointer_cast<Decoder>(load_decoder(path, options));
      },
      "path"_a, "shares"_a = nb::none(), "tile"_a = 512, "min_rows"_a = 192, "attention"_a = nb::none(),
      "precision"_a = "exact", nb::call_guard<nb::gil_scoped_release>(),
      "Reads a model folder or .gguf file; shares(site, weight) gives each site's [(unit, share)], [] for main alone; "
      "attention: whether attention with its projections is one site, None: where several units take part and heads "
      "suit their shares.");

  m.def("check_ids", &check_ids, "ids"_a, "config"_a, "before"_a = 0);
  nb::class_<Session>(m, "Session")
      .def(
          "__init__",
          [](Session* self, std::shared_ptr<Decoder> decoder, float temperature, float top_p, int top_k,
             uint64_t seed) {
            new (self) Session(std::move(decoder), {temperature, top_p, top_k, seed});
          },
          "decoder"_a, "temperature"_a = 0.0f, "top_p"_a = 0.0f, "top_k"_a = 0, "seed"_a = 0)
      .def(
          "feed", &Session::feed, "ids"_a, "reserve"_a = 0, "progress"_a = nb::none(),
          nb::call_guard<nb::gil_scoped_release>())
      .def("feed_for_logits", &Session::feed_for_logits, "ids"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("next", &Session::next, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("last_logits", &Session::last_logits)
      .def_prop_ro("length", &Session::length)
      .def_ro_static("chunk", &Session::chunk);
}

} // namespace cleave
