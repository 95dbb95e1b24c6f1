"""The names of the seed's split_linear module, kept so that programs written against it run on cleave.

    from split_linear import patch_model, SplitLinear
    bridge = patch_model(model, seq=512)

The seed's routing applies (``mode="seed"``): every linear layer alone, layers with more than twice as
many inputs as outputs on main, 0.65 of the rows to the partner unless told. New programs use
``cleave.patch_model``.
"""

import cleave
from cleave import SplitLinear, unpatch_model

__all__ = ["SplitLinear", "patch_model", "unpatch_model"]


def patch_model(model, seq=512, units=None, shares=None):
    """Patches a model with the seed's routing and returns the :class:`cleave.Report`.

    units: as for cleave.patch_model; None means main and the first partner this machine has.
    """
    if units is None:
        partners = [a.name for a in cleave.available_units() if a.available]
        units = ["main", partners[0]]
    return cleave.patch_model(model, units=units, seq=seq, shares=shares, mode="seed")
