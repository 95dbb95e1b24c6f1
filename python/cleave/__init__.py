"""Prefill of language models on every compute unit of one machine at the same time."""

from cleave._load import _core
from cleave.layers import SplitEmbedding, SplitLinear, SplitMLP
from cleave.patch import patch_model, unpatch_model
from cleave.report import Report
from cleave.runner import Generation, Runner

__version__ = _core.__version__
make_unit = _core.make_unit
available_units = _core.available_units

__all__ = [
    "Generation",
    "Report",
    "Runner",
    "SplitEmbedding",
    "SplitLinear",
    "SplitMLP",
    "available_units",
    "make_unit",
    "patch_model",
    "unpatch_model",
]
