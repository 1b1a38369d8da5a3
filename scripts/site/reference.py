"""The pages of the reference: which public names each documents. A test checks that every public name is in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the reference. names: module -> its names, in the order of the page."""

    file: str
    title: str
    text: str
    names: Mapping[str, Sequence[str]]

    def paths(self) -> list[str]:
        """The dotted names of the page."""
        return [f"{module}.{name}" for module, names in self.names.items() for name in names]

    def markdown(self) -> str:
        """The page, for mkdocstrings."""
        parts = [f"# {self.title}", self.text, *(f"::: {path}" for path in self.paths())]
        return "\n\n".join(parts) + "\n"


PAGES = (
    Page(
        "engine",
        "Engine",
        "`Engine` builds a rank's part of a model and trains it as a [plan](plans.md) says. "
        "[What a step does](../program.md) describes a step, [adapters](../adapters.md) the models it takes.",
        {
            "atoll": ["Engine", "Muon", "train"],
            "atoll.runtime.sharding.matrices": ["MatrixUpdate"],
            "atoll.runtime.sharding.muon": ["MatricesAndRest"],
            "atoll.runtime.assemble.describe": ["programs_of"],
            "atoll.runtime.engine": ["Evaluation"],
            "atoll.runtime.pipeline.step_end": ["StepResult"],
            "atoll.runtime.handover": ["StreamedTensor", "WeightGroup", "copy_weights", "give", "take", "weight_group"],
            "atoll.runtime.changes": ["HeldWeights"],
            "atoll.runtime.vllm_worker": ["WeightReceiver"],
            "atoll.runtime.services.parameters": ["StoredShard"],
            "atoll.runtime.services.stream": ["WeightStream"],
            "atoll.runtime.services.timing": ["StepTiming"],
        },
    ),
    Page(
        "plans",
        "Plans",
        "A `Plan` combines a mesh, a [layout](layouts.md), a [schedule](schedules.md), a precision and microbatches.",
        {"atoll": ["Plan", "MeshShape", "Outer"], "atoll.plans.plan": ["Place", "View"]},
    ),
    Page(
        "layouts",
        "Layouts",
        "Where parameters, gradients and optimizer state are stored, and what that costs in memory and traffic. "
        "[Layouts](../layouts.md) explains them.",
        {
            "atoll": ["Layout", "Precision"],
            "atoll.plans.layouts": [
                *("Level", "LAYOUT_ALIASES", "ALL_LAYOUTS", "EFFECTIVE", "PRESETS", "ITEM_BYTES"),
                *("Float8", "FLOAT8_RECIPES"),
                *("footprint", "Footprint", "kept_bytes", "saved_besides", "saved_bytes"),
                *("traffic", "Traffic", "published_memory", "PublishedMemory", "AT_ONCE"),
                *(
                    "Sharding",
                    "StoredCopies",
                    "SegmentShape",
                    "Shape",
                    "FlatMap",
                    "FlatEntry",
                    "Nest",
                    "Slice",
                    "Box",
                    "boxes",
                ),
                *("Axis", "MoveKind", "Move", "Moves", "GATHER_INTRA", "GATHER_INTER", "REDUCE_INTRA", "REDUCE_INTER"),
                *("GATHER_PARAMETER", "REDUCE_GRADIENT", "SYNC_GRADIENT", "SYNC_PARAMETER"),
                *("Codec", "Codecs", "NO_CODECS", "CODES", "BLOCK", "ROUNDINGS", "Rounding"),
                *(
                    "Whole",
                    "Transform",
                    "NewtonSchulz",
                    "Matrix",
                    "Holders",
                    "MatrixPiece",
                    "matrix_pieces",
                    "deal",
                    "swapped_along",
                ),
            ],
        },
    ),
    Page(
        "schedules",
        "Schedules",
        "The order in which each pipeline rank runs its actions. [Schedules](../schedules.md) lists the catalogue, "
        "[which schedule](../which-schedule.md) helps to choose.",
        {
            "atoll.plans.schedules": [
                *("build", "CATALOGUE", "Entry", "ClosedForm", "RankForm", "Sizes"),
                *("Problem", "Memory", "Links", "PipelineLink", "lower_bound"),
            ],
            "atoll.plans.slices": ["even_slices", "slice_shares", "slice_work"],
            "atoll.plans.ir": [
                *("Schedule", "Action", "Op", "Placement"),
                *("lower", "insert_messages", "insert_sharding", "insert_vocabulary"),
                *("COMPUTE", "MESSAGES", "SHARDING", "VOCABULARY"),
            ],
        },
    ),
    Page(
        "programs",
        "Programs",
        "The instructions that a rank executes in a step. [What a step does](../program.md) explains them.",
        {
            "atoll.program": [
                *(
                    "Program",
                    "Programs",
                    "Instruction",
                    "Do",
                    "Sliced",
                    "Operation",
                    "OPERATIONS",
                    "operation_of",
                    "Lane",
                    "Partners",
                    "Phase",
                    "Part",
                    "parts_of",
                    "lower_row",
                    "check_program",
                ),
                *("RankShape", "StageShape", "BlockShape", "UnitShape", "unit_shape", "Ending"),
                *("ModelShape", "Using", "using", "groups_of", "by_index"),
                *("Held", "WorkingMemory", "working_memory", "needed_in_a_step", "Hosted", "Kept", "Partial"),
                *("Bytes", "peaks", "sent_by", "way_of", "makes", "BACKWARD", "PHASES", "EMBEDDING", "HEAD"),
            ],
        },
    ),
    Page(
        "simulation",
        "Simulation and traces",
        "Simulated and measured steps are traces of the same type.",
        {
            "atoll": ["simulate"],
            "atoll.program.sim": ["Costs", "Rates", "Speed", "play_programs", "PlayedPrograms", "RankTiming"],
            "atoll.program.trace": [
                "Trace",
                *("Span", "Idle", "MemorySample", "to_chrome", "from_chrome", "action_lane", "apart", "AnyTimed"),
            ],
        },
    ),
    Page(
        "planner",
        "Planner",
        "Chooses a plan for a workload on a cluster. [Plan](../plan.md) explains it.",
        {
            "atoll": ["plan", "predict", "Cluster"],
            "atoll.prediction.planner": [
                *("Goal", "Space", "PlanSearch", "Found", "Answer", "Candidate", "ChoiceAlternative", "Change"),
                *("Order", "choices", "settings", "BUDGET"),
            ],
        },
    ),
    Page(
        "models",
        "Models",
        "Adapters that split a model into blocks, the built-in decoder, initial values and weights. "
        "[Models](../models.md) and [adapters](../adapters.md) explain them.",
        {
            "atoll.runtime.models": [
                *("Adapter", "Block", "Vocabulary", "Batch", "adapter_for", "check_blocks", "shared_parameters"),
                *("Decoder", "DecoderConfig", "MixtureConfig", "DecoderAdapter", "SequentialAdapter"),
                *("Weights", "weights_for", "initialise_model", "initialise_block", "initial_values", "reset_module"),
                *("name_seed", "count", "weigh_blocks", "relative_score", "transformer_of", "STYLES"),
                *("Loss", "token_cross_entropy", "check_documents"),
            ],
        },
    ),
    Page(
        "data",
        "Data",
        "Text to tokens, and the order of samples. [Data](../data.md) explains them.",
        {
            "atoll.training.data": [
                *("Source", "find_source", "documents", "fingerprint", "prepare", "preview", "Corpus"),
                *("prepare_supply", "preview_supply", "Supply", "Name"),
                *("Tokenizer", "ByteTokenizer", "FileTokenizer", "expected_ids"),
                *("SampleOrder", "sample_count", "batch", "TokenBatch", "validation_batches", "hide", "IGNORED_LABEL"),
                *("Rows", "rows_of", "Packing", "SplitTokens", "loader"),
            ],
        },
    ),
    Page(
        "config",
        "Config",
        "The TOML file of a run. [Training](../training.md) lists its keys.",
        {
            "atoll.training.config": [
                *("load", "from_dict", "known_keys", "Config", "Model", "Lora", "Data", "Train", "Parallel", "Run"),
                "Checkpoint",
            ],
        },
    ),
    Page(
        "errors",
        "Errors",
        "All errors are subclasses of `AtollError`. [Errors](../errors.md) lists exit codes.",
        {
            "atoll": ["AtollError"],
            "atoll.base.errors": [
                *("UserError", "ConfigError", "ScheduleError", "LayoutError", "PlanError", "DataError", "RecordError"),
                *("CheckpointError", "DamageError", "RunError", "BadStepError", "ReplicaError", "RankError"),
                *("CostWarning", "UnverifiedWarning", "WeightsWarning"),
            ],
        },
    ),
    Page(
        "testing",
        "Testing",
        "Run a function on several ranks of this machine, in your own tests.",
        {"atoll.testing": ["run_ranks", "RankPool"]},
    ),
)


def overview() -> str:
    """The first page of the reference: every page with its names."""
    rows = [f"| [{page.title}]({page.file}.md) | {_names(page)} |" for page in PAGES]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every public name of `atoll` and its public modules. `import atoll` imports neither torch nor numpy; a "
            "name loads its module when it is first used.",
            "",
            "| page | names |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _names(page: Page) -> str:
    return ", ".join(f"[`{path.removeprefix('atoll.')}`][{path}]" for path in page.paths())
