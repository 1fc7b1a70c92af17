"""docs/coming-from.md lists what differs from hivemind on purpose: for each row there is a test of what it says."""

from __future__ import annotations

import ast

import pytest

from tests.documents.pages import ROOT

HELD_BY = """
a Go daemon (`p2pd`), | tests/dht/test_dht.py::test_forked_child_knows_facts_only
a peer listens at | tests/net/test_tcp.py::test_listening_everywhere
`use_auto_relay=False`, | tests/reach/test_reach.py::test_trusted_relays_are_parsed_and_relays_can_be_turned_off
a peer that nobody | tests/dht/test_joining.py::test_unreachable_peer_joins_as_a_client
`conn_manager`, `dht_mode`, `tls`, | tests/test_drop_in.py::test_what_belongs_to_a_daemon_is_accepted_and_told_once
QUIC addresses in `host_maddrs` | tests/test_drop_in.py::test_addresses_for_quic_are_skipped
RSA keys in `identity_path`, | tests/test_drop_in.py::test_an_rsa_identity_is_refused_with_the_fix
an RSA peer id | tests/test_drop_in.py::test_an_address_with_an_rsa_peer_id_is_an_error_of_the_daemon
an initial peer that | tests/test_drop_in.py::test_a_peer_that_cannot_be_reached_is_told
protobuf messages, `add_protobuf_handler`, `add_binary_stream_handler` | tests/net/test_rpc.py::test_unary
a peer with a | tests/dht/test_neighbours.py::test_neighbour_with_another_clock_joins_with_warning
nothing limits what strangers | tests/net/test_limits.py::test_thousands_of_strangers_do_not_keep_honest_peers_out
node ids are random | tests/dht/test_finding.py::test_last_of_sixty_nodes_calls_others_by_id
`store` returns what the | tests/dht/test_node.py::test_minority_does_not_decide_a_store
records live as long | tests/dht/test_records.py::test_a_record_lives_a_day_at_most
a node keeps as | tests/dht/test_quotas.py::test_half_of_the_room_is_free_for_all
only nodes with a | tests/dht/test_ownership.py::test_only_the_owner_can_overwrite_a_record
a blocking call inside | tests/dht/test_dht.py::test_blocking_calls_inside_the_loop_are_refused
peers with another codec, | tests/averaging/test_rounds.py::test_peers_with_other_settings_refuse_and_say_why
when a peer | tests/averaging/test_sessions.py::test_nobody_waits_for_a_member_that_has_left_before_it_sent_anything
tensors of auxiliary peers | tests/averaging/test_rounds.py::test_only_auxiliaries_finish_and_change_nothing
each tensor is cut | tests/averaging/test_partition.py::test_tensors_whose_values_are_encoded_one_by_one_are_cut_as_one
bfloat16 travels as float32 | tests/compression/test_codecs.py::test_bfloat16_travels_as_float32_or_as_it_is
`BlockwiseQuantization` needs | tests/compression/test_quantization.py::test_cubes_lose_less_than_the_dynamic_type
`gather`, | tests/averaging/test_untrue_messages.py::test_more_to_gather_than_fits_is_refused_before_anything_is_sent
`PowerSGDGradientAverager` | tests/optim/test_low_rank_averagers.py::test_all_peers_begin_with_the_same_directions
the donor with the | tests/hostile/test_newcomers.py::test_newcomers_take_the_state_that_most_donors_have
`client_mode=None` of | tests/optim/test_optimizer_options.py::test_client_mode_defaults_to_that_of_the_dht
if a round of | tests/optim/test_optimizer.py::test_without_a_group_a_peer_finally_steps_alone
a peer that is | tests/optim/test_optimizer.py::test_a_peer_that_missed_a_round_downloads
batches of other sizes | tests/optim/test_grad_averager.py::test_every_sample_counts_the_same
a batch without gradients | tests/optim/test_missing_gradients.py::test_a_batch_without_any_gradient_does_not_count
a first step with | tests/optim/test_optimizer_state.py::test_initialization_changes_nothing_that_training_could_see
a newcomer steps its | tests/optim/test_schedules.py::test_a_joiner_continues_the_schedule
peers of a run | tests/optim/test_company.py::test_a_newcomer_with_another_option_stops_at_once
whatever a | tests/guard/test_policy.py::test_a_stranger_that_does_not_come_counts_for_nothing_until_it_has_paid_for_it
`load_state_from_peers` of `Optimizer` | tests/optim/test_optimizer.py::test_a_newcomer_may_refuse_the_state
your | tests/optim/test_optimizer_options.py::test_checkpoints_restore_state_and_epoch
a call of an expert | tests/moe/test_expert.py::test_silent_server_is_a_timeout_and_learns_of_it
a backward pass whose | tests/moe/test_expert.py::test_each_backward_trains_once_even_if_its_answer_is_lost
results and gradients are | tests/moe/test_expert.py::test_results_are_where_the_inputs_are
a mixture sends each | tests/moe/test_mixture.py::test_output_is_weighted_and_each_expert_is_asked_once
`k_min` answers are enough | tests/moe/test_mixture.py::test_each_sample_needs_answers
`k_min=0` makes | tests/moe/test_mixture.py::test_time_limits_hold
a dead expert is | tests/moe/test_mixture.py::test_failed_experts_have_no_weight_and_are_avoided
the loss that balances | tests/moe/test_mixture.py::test_switch_balances_its_experts
empty marks in grids | tests/moe/test_beam_search.py::test_marks_of_a_flat_grid_do_not_refuse_experts
one request of a | tests/moe/test_server.py::test_only_the_wrong_one_of_merged_requests_fails
an empty batch, or | tests/serving/test_runtime.py::test_short_batch_leaves_at_its_timeout
a server has eight | tests/moe/test_server.py::test_experts_are_declared_and_withdrawn
a gradient of NaN | tests/moe/test_backend.py::test_failed_backward_changes_nothing
`clip_grad_norm` or a | tests/moe/test_backend.py::test_contradictions_are_refused
`background_server` hangs | tests/moe/test_server.py::test_background_server_that_cannot_start
checkpoints of experts | tests/moe/test_backend.py::test_old_checkpoints_are_deleted
`compression` of a | tests/moe/test_server.py::test_codecs_reach_all_four_kinds_of_tensors
records of experts are | tests/moe/test_declaring.py::test_each_expert_has_the_records_of_its_prefixes
older versions of Python | tests/test_oldest.py::test_the_lowest_version_is_tested
`MPFuture` works across processes | tests/test_futures.py::test_another_loop_awaits_what_the_background_loop_does
`hivemind-dht` has a new | tests/cli/test_dht_command.py::test_scripts_read_the_addresses_from_stderr
`HIVEMIND_LOGLEVEL` and the | tests/test_environment.py::test_the_own_spelling_comes_first_and_empty_counts_as_unset
long log lines from | tests/test_logs.py::test_the_first_logger_turns_the_lines_of_shoal_on
`HivemindStrategy` runs on Linux, | tests/lightning/test_strategy.py::test_where_to_listen
Lightning's schedule is one | tests/lightning/test_strategy.py::test_as_without_the_strategy
"""
"""How each row begins, and the test that holds it."""

NOTHING_TO_TEST = {"peers that run hivemind", "`hivemind.moe`, `hivemind-server`"}

TABLE = dict(line.rsplit(" | ", 1) for line in HELD_BY.strip().splitlines())


def rows() -> list[str]:
    """The first cell of each row."""
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    section = text.partition("### What differs on purpose\n")[2].partition("\n### ")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    return [cell for cell in cells if cell != "in hivemind"]


def test_rows_and_entries_match_one_to_one() -> None:
    found = [row for row in rows() if row not in NOTHING_TO_TEST]
    assert len(found) > 20
    assert [sum(row.startswith(beginning) for beginning in TABLE) for row in found] == [1] * len(found)
    assert [sum(row.startswith(beginning) for row in found) for beginning in TABLE] == [1] * len(TABLE)


@pytest.mark.parametrize("beginning", TABLE)
def test_the_test_of_a_row_exists(beginning: str) -> None:
    file, _, name = TABLE[beginning].partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert name in functions, f"{file} has no {name}"
