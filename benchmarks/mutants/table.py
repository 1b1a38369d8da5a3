"""Which tests should notice damage to which module: a selection of what is quick, the most telling first."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PARITY = "tests/runtime/test_parity.py"
ENGINE = "tests/runtime/test_engine.py"
TENSOR = "tests/runtime/test_tensor_parallel.py"
POST = "tests/runtime/test_post_validation.py"
TRAFFIC = "tests/runtime/test_memory_and_traffic.py"
VOCABULARY = "tests/runtime/test_vocabulary.py"

TRAINED = (
    f"{PARITY}::test_effective_layouts_in_a_pipeline",
    f"{PARITY}::test_each_difficulty_alone",
    f"{PARITY}::test_recompute",
)
"""A few layouts and schedules against one process."""

SPLIT = (
    f"{VOCABULARY}::test_every_kind_of_layout",
    f"{VOCABULARY}::test_on_two_levels",
    f"{VOCABULARY}::test_recompute",
    f"{VOCABULARY}::test_which_ends_are_trained",
    f"{VOCABULARY}::test_the_decoder",
    f"{VOCABULARY}::test_evaluation_and_logits",
    f"{VOCABULARY}::test_whole_parameters_and_gradients_are_read_and_edited_on_every_rank",
    f"{VOCABULARY}::test_checkpoints_go_from_and_to_any_split",
    f"{VOCABULARY}::test_weights_are_read_by_range",
    f"{VOCABULARY}::test_models_that_cannot_be_split_are_refused",
    f"{VOCABULARY}::test_meshes_that_do_not_fit_are_refused",
    f"{VOCABULARY}::test_labels_outside_of_the_vocabulary_are_refused_and_the_engine_goes_on",
)
"""A vocabulary split over the pipeline."""

TRAINING = (
    "tests/training/test_endings.py",
    "tests/training/test_train.py",
    "tests/cli/test_train.py::test_a_run_leaves_its_files",
    "tests/cli/test_train.py::test_the_plan_says_what_each_rank_holds",
    "tests/cli/test_train.py::test_results_are_on_stdout_and_progress_on_stderr",
    "tests/cli/test_train.py::test_torchrun_starts_ranks_and_a_local_process_resumes",
)
"""Training runs and what they leave."""

TABLE: dict[str, tuple[str, ...]] = {
    "ir/": ("tests/ir", "tests/test_sim.py"),
    "ir/draw.py": ("tests/ir/test_draw.py", "tests/cli/test_schedule.py"),
    "ir/text.py": ("tests/ir/test_text.py", "tests/ir/test_action.py", "tests/cli/test_schedule.py"),
    "program/": (
        "tests/program",
        "tests/runtime/test_residency.py::test_gathers_and_reductions_are_those_of_the_schedule",
        "tests/runtime/test_overlap.py",
    ),
    "layouts/": ("tests/layouts", "tests/test_plans.py"),
    "sim/": ("tests/test_sim.py", "tests/test_sim_programs.py", "tests/test_trace.py"),
    "data/": ("tests/data",),
    "runtime/": (ENGINE,),
    "runtime/checkpoint/": (
        "tests/runtime/test_checkpoint_files.py",
        "tests/runtime/test_resume.py",
    ),
    "training/": TRAINING,
    "training/samples.py": ("tests/training/test_samples.py", *TRAINING),
    "training/pretrained.py": ("tests/training/test_interchange.py", "tests/runtime/test_lora.py", *TRAINING),
    "training/process.py": ("tests/cli/test_train.py", "tests/training/test_train.py"),
    "runtime/places.py": ("tests/runtime/test_places.py",),
    "runtime/launch.py": ("tests/runtime/test_launch.py", "tests/testing/test_pool.py"),
    "training/signals.py": ("tests/cli/test_train.py::test_a_signal_saves_and_leaves",),
    "runtime/verdict.py": ("tests/runtime/test_verdict.py",),
    "runtime/page.py": ("tests/runtime/test_page.py", "tests/runtime/test_failure.py"),
    "runtime/failure.py": (
        "tests/runtime/test_failure.py",
        "tests/cli/test_train.py",
        "tests/runtime/test_launch.py",
        "tests/runtime/test_lanes.py",
    ),
    "training/interchange.py": ("tests/training/test_interchange.py",),
    "runtime/allocator.py": ("tests/runtime/test_allocator.py",),
    "runtime/randomness.py": ("tests/runtime/test_randomness.py", ENGINE),
    "runtime/engine.py": (
        ENGINE,
        f"{PARITY}::test_effective_layouts_in_a_pipeline",
        "tests/runtime/test_stages.py",
        TRAFFIC,
        f"{TENSOR}::test_sequences_that_do_not_divide_are_refused",
        f"{POST}::test_units_are_stepped_as_their_gradients_arrive",
        "tests/runtime/test_access.py::test_a_refusal_while_looking_at_gradients_loses_nothing",
    ),
    "runtime/pipeline/step_end.py": (
        POST,
        "tests/runtime/test_loss_scaler.py",
        "tests/runtime/test_shared_parameters.py",
        f"{ENGINE}::test_a_loss_that_is_not_finite_updates_nothing",
        f"{ENGINE}::test_a_stage_with_nothing_to_train_does_not_hang",
        *TRAINED,
        f"{ENGINE}::test_evaluation_sees_the_new_values_and_changes_nothing",
    ),
    "runtime/lanes.py": ("tests/runtime/test_lanes.py", "tests/runtime/test_overlap.py", *TRAINED),
    "runtime/transport/shared_memory.py": ("tests/runtime/test_shared_memory.py", TRAFFIC),
    "runtime/transport/": (
        "tests/runtime/test_transport.py",
        "tests/runtime/test_shared_memory.py",
        "tests/runtime/test_staged.py",
        *TRAINED,
        TRAFFIC,
        "tests/runtime/test_lanes.py",
        f"{VOCABULARY}::test_on_two_levels",
        f"{TENSOR}::test_the_decoder",
        f"{POST}::test_stages_that_stepped_wrongly_take_their_step_back",
    ),
    "runtime/assemble/": (
        "tests/runtime/test_describe.py",
        "tests/runtime/test_stages.py",
        "tests/runtime/test_units.py",
        TRAFFIC,
        *TRAINED,
        "tests/runtime/test_shared_parameters.py",
        f"{VOCABULARY}::test_on_two_levels",
    ),
    "runtime/assemble/holdings.py": (TRAFFIC, "tests/runtime/test_residency.py"),
    "runtime/outline.py": ("tests/runtime/test_describe.py", "tests/runtime/test_stages.py", *TRAINED),
    "runtime/mail.py": (
        "tests/runtime/test_executor_order.py",
        *TRAINED,
        "tests/runtime/test_schedules_parity.py",
        f"{POST}::test_stages_that_stepped_wrongly_take_their_step_back",
        f"{ENGINE}::test_evaluation_takes_fewer_microbatches_and_padding",
        f"{VOCABULARY}::test_on_two_levels",
    ),
    "runtime/vocabulary/": SPLIT,
    "runtime/pipeline/": (
        "tests/runtime/test_executor_order.py",
        *TRAINED,
        "tests/runtime/test_schedules_parity.py",
        "tests/runtime/test_shared_parameters.py",
        f"{POST}::test_faults_at_chosen_stages",
        f"{ENGINE}::test_evaluation_takes_fewer_microbatches_and_padding",
        f"{ENGINE}::test_an_error_in_one_rank_names_the_rank_the_step_and_the_action",
        f"{VOCABULARY}::test_an_error_in_a_message_of_a_slice_names_both_ends",
    ),
    "runtime/pipeline/deferred.py": (
        "tests/runtime/test_deferred.py",
        *TRAINED,
        "--deselect=tests/runtime/test_deferred.py::test_compiled_blocks[1-1f1b]",
        "--deselect=tests/runtime/test_deferred.py::test_compiled_blocks[2-zb-h1]",
    ),
    "runtime/pipeline/clock.py": (
        "tests/runtime/test_executor_order.py",
        "tests/runtime/test_lanes.py",
        f"{ENGINE}::test_the_timeline_and_the_profiler_name_the_actions",
        *TRAINING,
    ),
    "runtime/sharding/": (
        TRAFFIC,
        *TRAINED,
        "tests/runtime/test_units.py",
        "tests/runtime/test_overlap.py",
        f"{ENGINE}::test_the_factory_gets_groups_of_slices_that_cover_every_parameter",
        f"{ENGINE}::test_users_checkpointing_modules_called_twice_and_merged_weights",
        f"{POST}::test_stages_that_stepped_wrongly_take_their_step_back",
        "tests/runtime/test_precision.py",
        "tests/runtime/test_shared_parameters.py",
        "tests/runtime/test_randomness.py",
        "tests/runtime/test_shared_memory.py::test_shared_memory_changes_no_bit",
        f"{VOCABULARY}::test_on_two_levels",
    ),
    "runtime/sharding/unit.py": (
        "tests/runtime/test_units.py",
        "tests/runtime/test_residency.py::test_a_parameter_is_gathered_and_reduced_as_often_as_the_table_says",
        TRAFFIC,
        *TRAINED,
    ),
    "runtime/sharding/access.py": ("tests/runtime/test_access.py",),
    "runtime/sharding/optimizer.py": (
        POST,
        f"{ENGINE}::test_elementwise_optimizers_do_not_see_the_sharding",
        f"{ENGINE}::test_an_optimizer_of_whole_matrices_is_refused_by_name",
        f"{ENGINE}::test_the_factory_gets_groups_of_slices_that_cover_every_parameter",
        "tests/runtime/test_resume.py",
        *TRAINED,
    ),
    "runtime/sharding/state.py": ("tests/runtime/test_resume.py", f"{POST}::test_every_layout"),
    "runtime/sharding/tensor_parallel.py": (TENSOR,),
    "runtime/sharding/tensors.py": (TENSOR,),
}
"""The longest beginning of a module's path decides. A test file of a module's own name comes first."""


def row_of(module: str) -> str:
    """The row that decides for a module below src/atoll."""
    rows = [start for start in TABLE if module.startswith(start)]
    if not rows:
        raise KeyError(f"no tests for {module}: give it a row in benchmarks/mutants/table.py")
    return max(rows, key=len)


def files_of(row: str) -> dict[str, tuple[str, ...]]:
    """What a row tells pytest, by test file or folder."""
    found: dict[str, tuple[str, ...]] = {}
    for word in TABLE[row]:
        file = word.removeprefix("--deselect=").partition("::")[0]
        found[file] = (*found.get(file, ()), word)
    return found


def tests_of(module: str) -> tuple[str, ...]:
    """What pytest is told for a module below src/atoll."""
    start = row_of(module)
    own = f"tests/{start}test_{module.removeprefix(start)}"
    return (own, *TABLE[start]) if start.endswith("/") and (ROOT / own).is_file() else TABLE[start]
