"""Finds the sites of a model by walking its modules."""

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from cleave._load import _core

# Linears that read one input, by the names that mlx_lm and mlx_vlm give them. A wrong guess costs
# nothing but the group: at run time each member checks that it was called with the group's input.
GROUPS = [
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
]
# gate, up, down of a gated MLP.
MLPS = [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass
class Found:
    """A site of the model: its kind ("linear group", "mlp", "head") and the modules with weights."""

    kind: str
    path: str
    modules: dict  # path -> module, in order
    owner: object = None  # mlp: the module that is called
    activation: str = ""

    @property
    def name(self) -> str:
        if self.kind == "mlp":
            return self.path
        names = [p.rsplit(".", 1)[-1] for p in self.modules]
        parent = next(iter(self.modules)).rpartition(".")[0]
        return (parent + "." if parent else "") + "+".join(names)


@dataclass
class Discovery:
    sites: list = field(default_factory=list)
    refused: list = field(default_factory=list)  # (path, reason)


def linear_weight(module: nn.Module) -> "_core.LinearWeight":
    """The weight of a Linear, QuantizedLinear, Embedding or QuantizedEmbedding."""
    packed = "scales" in module
    return _core.LinearWeight(
        module["weight"],
        module["scales"] if packed else None,
        module.get("biases") if packed else None,
        module.get("bias"),
        module.group_size if packed else 0,
        module.bits if packed else 0,
        module.mode if packed else "",
    )


def is_linear(module) -> bool:
    """Whether a module is called exactly as nn.Linear or nn.QuantizedLinear is."""
    call = getattr(type(module), "__call__", None)
    return call in (nn.Linear.__call__, nn.QuantizedLinear.__call__)


def is_embedding(module) -> bool:
    call = getattr(type(module), "as_linear", None)
    return call in (nn.Embedding.as_linear, nn.QuantizedEmbedding.as_linear)


def _random_linear(k: int, n: int, seed: int) -> nn.Linear:
    """In fp32, wide enough that activations differ, with a bias to see both signs; draws nothing from
    mlx's global random state, which is the user's."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    key = mx.random.key(seed)
    layer.weight = mx.random.normal((n, k), key=key) / 2
    layer.bias = mx.random.normal((n,), key=key)
    return layer


def mlp_activation(module: nn.Module, names) -> str:
    """The activation for which ``down(act(gate(x)) * up(x))`` is what the module computes, or "".

    A probe, not a guess by class name: gate, up and down are replaced for one call by small random
    layers, so that it costs microseconds whatever the model's size, and the result is compared with
    the formula for each activation that cleave knows.
    """
    k, hidden = 16, 32
    stand_ins = [
        _random_linear(k, hidden, 1),
        _random_linear(k, hidden, 2),
        _random_linear(hidden, k, 3),
    ]
    x = mx.random.normal((1, 8, k), key=mx.random.key(0))
    originals = {name: module[name] for name in names}
    try:
        for name, layer in zip(names, stand_ins):
            module[name] = layer
        y = type(module).__call__(module, x)
        if not isinstance(y, mx.array) or y.shape != x.shape:
            return ""
        mx.eval(y)
    except Exception:  # the module needs more than x, or shapes of its own: it is no plain MLP
        return ""
    finally:
        for name, layer in originals.items():
            module[name] = layer
    gate, up, down = stand_ins
    for activation in ACTIVATIONS:
        act = {
            "silu": nn.silu,
            "gelu": nn.gelu,
            "gelu_tanh": nn.gelu_approx,
            "relu": nn.relu,
        }[activation]
        expected = down(act(gate(x)) * up(x))
        # gelu and its tanh form differ by more than this on such inputs; rounding by far less.
        if mx.allclose(y, expected, rtol=1e-5, atol=1e-5).item():
            return activation
    return ""


def discover(model: nn.Module, mode: str) -> Discovery:
    """Walks the language model's modules. mode: "auto" (mlps and groups), "group" (no mlps),
    "linear" or "seed" (every Linear alone)."""
    prefix, root = "", model
    if isinstance(model.get("language_model"), nn.Module):
        prefix, root = "language_model", model["language_model"]
    found, taken = Discovery(), set()
    modules = sorted(root.named_modules(), key=lambda item: item[0])
    by_depth = [(".".join(p for p in (prefix, path) if p), m) for path, m in modules]

    def take(kind, path, members, **extra):
        if not any(id(m) in taken for m in members.values()):
            taken.update(id(m) for m in members.values())
            found.sites.append(Found(kind, path, members, **extra))

    def children(path, module, names):
        if all(is_linear(module.get(n)) for n in names):
            return {f"{path}.{n}" if path else n: module[n] for n in names}
        return None

    if mode in ("auto", "group"):
        for path, module in by_depth:
            for names in MLPS if mode == "auto" else ():
                members = children(path, module, names)
                if members is None:
                    continue
                activation = mlp_activation(module, names)
                if activation:
                    take("mlp", path, members, owner=module, activation=activation)
                else:
                    found.refused.append(
                        (path, "as one mlp: it does not compute down(act(gate(x)) * up(x))")
                    )
            for names in GROUPS:
                members = children(path, module, names)
                if members is not None:
                    take("linear group", path, members)
    outputs = {m["weight"].shape[0] for _, m in by_depth if is_linear(m)}
    for path, module in by_depth:
        if is_linear(module):
            take("linear group", path, {path: module})
        elif is_embedding(module) and module["weight"].shape[0] not in outputs:
            take("head", path, {path: module})  # tied: no Linear gives the vocabulary
        elif isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            name = type(module).__name__
            found.refused.append((path, f"{name} computes something else than a linear layer"))
        elif "Switch" in type(module).__name__ and "Linear" in type(module).__name__:
            found.refused.append((path, f"{type(module).__name__}: expert layers stay on main"))
        elif isinstance(module, nn.QQLinear):
            found.refused.append((path, "QQLinear quantises its input: it stays on main"))
    order = {path: i for i, (path, _) in enumerate(by_depth)}
    found.sites.sort(key=lambda s: order[next(iter(s.modules))])
    return found
