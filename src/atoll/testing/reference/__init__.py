"""The reference: the unsplit model, trained in one process with only torch and the model's own library.

Nothing of Atoll is imported here. The engine's adapter, initialization and seeding are implemented here a second time,
from their documentation:

    forward         the model's own, on a whole microbatch
    loss            cross-entropy of the labels that are not -100, or the recipe's; divided by the step's counted
                    labels, by its samples where there are no labels, or by what the recipe's loss counts
    initial values  each module's own rule, from a generator seeded from (seed, name)
    dropout         the generators are seeded from (seed, step, global microbatch, block) before each block
    update          the optimizer that is given, weight decay on matrices only, clipping by the global norm; Muon with
                    AdamW for what is no hidden matrix (`ReferenceMuon`)
    experts         losses of routers and steps of selection biases, if they are given (`Balancing`)
    FP8             torchao's own linear layers
    codecs          what `atoll.testing.coded` makes of gradients, parameters and outer gradients, if it is given

The two seeds are those of DESIGN.md, "Same result".
"""

from atoll.testing.reference.dropout import reference_seed
from atoll.testing.reference.federation import FederatedHistory, train_federation
from atoll.testing.reference.float8 import convert_layers
from atoll.testing.reference.initial import module_seed, rule_of, start
from atoll.testing.reference.losses import IGNORED, forward, rows, token_loss
from atoll.testing.reference.model import Recipe, Routed, named_parameters, tied
from atoll.testing.reference.muon import ReferenceMuon
from atoll.testing.reference.training import History, train_alone, train_islands

__all__ = [
    "IGNORED",
    "FederatedHistory",
    "History",
    "Recipe",
    "ReferenceMuon",
    "Routed",
    "convert_layers",
    "forward",
    "module_seed",
    "named_parameters",
    "reference_seed",
    "rows",
    "rule_of",
    "start",
    "tied",
    "token_loss",
    "train_alone",
    "train_federation",
    "train_islands",
]
