"""The test of the emulator: it must find each of these mistakes in a copy of the kernels."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from emulator import KERNELS, Emulator, EmulatorError, build
from operator_cases import CASES, as_double, cotangents_of, make_case, reference
from subjects import relative_error
from test_sanitizer import run_watched

# Ragged in every size, with several heads in a block, slabs, stages and chunks.
SHAPES = [(1, 3, 35, 5, 7), (2, 1, 38, 17, 20)]
# Numbers of 2 bytes, read 16 bytes at a time.
HALF_SHAPE = (1, 2, 38, 16, 24)
# On the tensor cores: bfloat16, except the states. Keys are copied 16 bytes at a time, values one by one.
CHUNK_SHAPE = (1, 2, 77, 24, 90)


BY_KEY = ("gla_by_key", "gated_delta_by_key")


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    rules: tuple[str, ...] = ("sum",)  # that it is looked for in
    complaint: str = ""  # the emulator's message if it finds more than wrong numbers


MUTATIONS = {
    "barrier_removed": Mutation("scan.cuh", "      __syncthreads();\n", ""),
    "barrier_for_some": Mutation(
        "scan.cuh",
        "      __syncthreads();\n",
        "      if (thread < kWarp) __syncthreads();\n",
        complaint="before a barrier",
    ),
    "ring_not_waited_for": Mutation("scan.cuh", "wait_copies<kMostBuffers - 2>()", "wait_copies<kMostBuffers - 1>()"),
    "a_buffer_too_few": Mutation("scan.cuh", "(at * plan.teams + team)", "(at % 2 * plan.teams + team)"),
    "copies_beyond_the_row": Mutation(
        "scan.cuh", "const bool inside = column < vector.limit;", "const bool inside = true;"
    ),
    "not_converted": Mutation("scan.cuh", "        if constexpr (sizeof(A) < 8) convert(at);\n", "", ("gated",)),
    "scalars_of_another_buffer": Mutation(
        "scan.cuh", "put_scalars(filled, asked)", "put_scalars(at, asked)", ("delta",)
    ),
    "outputs_of_the_stage_after": Mutation("scan.cuh", "write(last, before);", "write(at, before);"),
    "documents_not_begun": Mutation("scan.cuh", "to[layout.begins()] = asked.begins;", "to[layout.begins()] = 0;"),
    "absent_heads_write": Mutation("scan.cuh", "return head < size.heads;", "return true;"),
    "last_stage_dropped": Mutation(
        "scan.cuh", "(size.length + plan.stage - 1) / plan.stage", "size.length / plan.stage"
    ),
    "tail_one_too_long": Mutation(
        "scan.cuh", "left < tokens ? int(left) : tokens", "left < tokens ? int(left) + 1 : tokens"
    ),
    "column_beyond_the_last": Mutation("scan.cuh", "if (i < limit) round_to", "if (i <= limit) round_to"),
    "padding_not_written": Mutation(
        "scan.cuh", "if (kAtOnce * s + n < count) to", "if (kAtOnce * s + n < count && i < limit) to"
    ),
    "slot_shared_by_threads": Mutation(
        "forget.cuh", "kColumns * kWarp) + lane()", "kColumns * kWarp)", ("gated", "decay")
    ),
    "slots_overrun": Mutation(
        "launch_forget.cuh",
        "needs.states = Scan::states(group),",
        "needs.states = Scan::states(group) - 1,",
        ("gated", "decay"),
        "beyond its shared",
    ),
    "group_too_long": Mutation(
        "forget.cuh", "plan.stage ? int(left) : plan", "plan.stage ? int(left) + 1 : plan", ("gated", "decay")
    ),
    "state_not_restored": Mutation(
        "forget.cuh",
        "            else\n              restore(states, stage.group / 2, state);\n",
        "",
        ("gated", "decay"),
    ),
    "second_group_left_out": Mutation(
        "forget.cuh", "group = 2 * pair + (step == 1)", "group = 2 * pair", ("gated", "decay")
    ),
    "sum_one_step_short": Mutation(
        "scan.cuh", "distance < lanes; distance *= 2", "2 * distance < lanes; distance *= 2"
    ),
    "shuffle_of_some_lanes": Mutation(
        "forget.cuh",
        "      add_lanes(read, place.plan.lanes);\n      place.put_columns(token, kOut",
        "      if (place.lane > 0) add_lanes(read, place.plan.lanes);\n      place.put_columns(token, kOut",
        complaint="does not take part",
    ),
    "read_with_the_key": Mutation("forget.cuh", "      place.load_row(token, kQuery, row);\n", ""),
    "states_not_rebuilt": Mutation(
        "launch_forget.cuh", "        scan.kept = make.matrix(static_cast<const void*>(kept));\n", ""
    ),
    "chunks_without_barrier": Mutation("chunk_forward.cuh", "be filled.\n      __syncthreads();", "be filled."),
    "scores_without_barrier": Mutation(
        "chunk_forward.cuh", "    __syncthreads();  // for the scores\n", "", ("sum", "delta")
    ),
    "copies_not_waited_for": Mutation("chunk_forward.cuh", "      wait_copies<0>();\n", ""),
    "chunk_one_too_long": Mutation(
        "chunks.cuh", "left < kChunkTokens ? int(left)", "left < kChunkTokens ? int(left) + 1"
    ),
    "tail_not_zero": Mutation("chunks.cuh", "+ i : data, inside);", "+ i : data, true);"),
    "diagonal_left_out": Mutation(
        "chunks.cuh", "x = s <= t ? x : 0, y = s + 1 <= t ? y : 0", "x = s < t ? x : 0, y = s < t ? y : 0"
    ),
    "product_of_some_lanes": Mutation(
        "fragments.cuh",
        "FWP_UNROLL for (int h = 0; h < 2; ++h) mma(c[h], a, ",
        "FWP_UNROLL for (int h = 0; h < 2; ++h) if (line() > 0) mma(c[h], a, ",
        complaint="does not take part",
    ),
    "an_odd_padding": Mutation("fragments.cuh", "kPadding = 8", "kPadding = 7", complaint="16 bytes at"),
    "scores_not_in_step": Mutation(
        "chunks.cuh", "      __syncwarp();\n      const int b = lane()", "      const int b = lane()", ("delta",)
    ),
    "a_state_in_one_part": Mutation(
        "fragments.cuh", "if (m + n < most) multiply", "if (m + n < 1) multiply", ("delta",)
    ),
    "rate_of_the_wrong_token": Mutation(
        "chunk_backward.cuh", "return chunk.rate[t] * x;", "return chunk.rate[0] * x;", ("delta",)
    ),
    "states_not_waited_for": Mutation(
        "chunk_backward.cuh", "chunk, memory);\n    wait_state(n);\n", "chunk, memory);\n", ("sum", "delta")
    ),
    "columns_of_one_warp": Mutation("chunks.cuh", "w < warps; ++w", "w < 1; ++w", ("delta",)),
    "d_scores_without_barrier": Mutation(
        "chunk_backward.cuh", "    wait_state(n);\n    __syncthreads();\n", "    wait_state(n);\n", ("sum", "delta")
    ),
    "d_of_the_next_block_kept": Mutation(
        "chunk_backward.cuh",
        "        FWP_UNROLL for (int s = 0; s < t; ++s) add_erased(memory.scores, t, s, left[0], d_write[s]);\n",
        "",
        ("delta",),
    ),
    "a_grid_beyond_the_numbers": Mutation("fragments.cuh", "power + (16u << 23)", "power + (24u << 23)", ("gla",)),
    "small_parts_added_twice": Mutation("chunks.cuh", "        clear(product);\n      }\n", "      }\n", ("gla",)),
    "a_document_in_chunks_not_forgotten": Mutation("chunks.cuh", "asked.begins ? 0 : number_of", "number_of", ("gla",)),
    "decay_of_a_document": Mutation(
        "chunk_backward.cuh", "this->begins(memory.starts[6], n) ? 0 : found", "found", ("gla",)
    ),
    "scores_not_faded": Mutation("chunks.cuh", "      fade_scores(decays, row, column, read);\n", "", ("gated_delta",)),
    "product_one_token_short": Mutation("chunks.cuh", "if (t >= lane()) {", "if (t > lane()) {", ("gated_delta",)),
    "states_of_another_chunk": Mutation(
        "chunk_backward.cuh", "+ n - 1 : this->head()", ": this->head()", ("gated_delta",)
    ),
    "states_in_one_part": Mutation(
        "chunk_backward.cuh",
        "for (int m = 0; m < kParts; ++m) to[m]",
        "for (int m = 0; m < kParts; ++m) to[0]",
        ("gated_delta",),
    ),
    "gradient_not_faded": Mutation(
        "chunk_backward.cuh", "      this->fade(g, chunk.decays.whole());\n", "", ("gated_delta",)
    ),
    "keys_not_faded": Mutation(
        "chunk_backward.cuh",
        "      fade_rows(row, of_key, [&](int t) { return decays.to_end(t); });\n",
        "",
        ("gated_delta",),
    ),
    "decay_of_one_warp_of_the_state": Mutation("chunk_backward.cuh", "w < warps; ++w", "w < 1; ++w", ("gated_delta",)),
    "decay_of_what_is_erased": Mutation(
        "chunk_backward.cuh",
        "        if constexpr (kErases) reads -= fma(low(k), erased[h][i], high(k) * erased[h][i + 1]);\n",
        "",
        ("gated_delta",),
    ),
    "decay_of_the_chunk_before": Mutation(
        "chunk_backward.cuh", "store_decay(memory, n + 1)", "store_decay(memory, n)", ("gated_delta",)
    ),
    "correction_not_faded": Mutation(
        "forget.cuh", "fma(-decay[r], found[r], d_key[r])", "d_key[r] - found[r]", ("gated_delta_by_key",)
    ),
    "removal_after_fading": Mutation("forget.cuh", "      g.add(row, of_found);\n", "", ("rwkv7",)),
    "document_not_begun": Mutation("forget.cuh", "            place.clear_if_begins(token, g);\n", "", ("gla",)),
    "other_half_of_a_group": Mutation(
        "chunk_key_scores.cuh",
        "for (int i = 0; i < kSpan; i += kPiece)",
        "for (int i = 0; i < kPiece; i += kPiece)",
        BY_KEY,
    ),
    "scores_of_one_warp": Mutation("chunk_key_scores.cuh", "w < kWarps; ++w", "w < 1; ++w", BY_KEY),
    "scores_above_the_diagonal": Mutation("chunk_key_scores.cuh", "r == h && s <= line()", "r == h", BY_KEY),
    "erased_with_the_query": Mutation(
        "chunk_key_scores.cuh",
        "      this->load_readers(memory.tokens.key, this->own_column(), keys.query);\n",
        "",
        BY_KEY,
    ),
    "scores_not_waited_for": Mutation(
        "chunk_key_scores.cuh",
        "    multiply_in_groups(keys, own);\n    __syncthreads();\n",
        "    multiply_in_groups(keys, own);\n",
        BY_KEY,
    ),
    "decay_beyond_the_last_token": Mutation(
        "chunk_keys.cuh", "!asked.there ? DecaySource::one", "!asked.there ? DecaySource::given", BY_KEY
    ),
    "document_not_begun_by_key": Mutation(
        "chunk_keys.cuh",
        "asked.begins ? DecaySource::zero",
        "asked.begins ? DecaySource::given",
        BY_KEY,
    ),
    "groups_not_joined": Mutation("chunk_keys.cuh", "if constexpr (kGroups > 2) join<2>(keys.whole[1]);", "", BY_KEY),
    "block_not_whole": Mutation("chunk_keys.cuh", "own * whole[0][e], 2 * kSpan", "own, 2 * kSpan", BY_KEY),
    "scaled_not_waited_for": Mutation(
        "chunk_key_states.cuh",
        "      scale(chunk.tokens, memory);\n      __syncthreads();\n",
        "      scale(chunk.tokens, memory);\n",
        BY_KEY,
    ),
    "state_not_faded_by_key": Mutation("chunk_key_states.cuh", "x *= memory.whole[i * kBlock + r];", "", BY_KEY),
    "erased_in_one_order": Mutation("chunk_key_states.cuh", "kReverse ? kChunkBlocks - 1 - i : i", "i", BY_KEY),
    "erasing_in_one_part": Mutation("chunk_key_states.cuh", "scores[kScoreParts + m]", "scores[kScoreParts]", BY_KEY),
    "erased_added": Mutation(
        "chunk_key_states.cuh", "add_write<kEraserParts, true>", "add_write<kEraserParts, false>", BY_KEY
    ),
    "score_of_a_token_with_itself": Mutation(
        "chunk_key_gradients.cuh", "        if (kOfErased && t == s) x = 0;\n", "", BY_KEY
    ),
    "gradient_of_one_block": Mutation("chunk_key_gradients.cuh", "kGroups > 1 ? kBlock - row : row", "row", BY_KEY),
    "pairs_of_a_group_twice": Mutation(
        "chunk_key_gradients.cuh",
        "        if (kGroups == 1) left[m][0] = left[m][3] = 0;  // pairs of tokens of one group\n",
        "",
        BY_KEY,
    ),
    "decay_of_the_state": Mutation(
        "chunk_key_gradients.cuh", "d_products.from_start[kSpan - 1][e] += sums[own_number() + e];", "", BY_KEY
    ),
    "gradient_of_one_group": Mutation(
        "chunk_key_gradients.cuh",
        "      if constexpr (kGroups > 1) d_whole += __shfl_xor_sync(0xffffffffu, d_whole, kSpan);\n",
        "",
        BY_KEY,
    ),
    "state_of_this_chunk": Mutation(
        "chunk_key_gradients.cuh", "whole + n - 1) * numbers", "whole + n) * numbers", BY_KEY
    ),
    "decay_of_the_first_token": Mutation(
        "chunk_key_gradients.cuh", "t > 0 ? products.from_start[t - 1][e] : 1", "products.from_start[t][e]", BY_KEY
    ),
    "rate_of_one_warp": Mutation("chunks.cuh", "w < warps; ++w", "w < 1; ++w", BY_KEY),
    "rate_forgotten": Mutation("forget.cuh", "    scaled(rate, d_row, d_row);\n", "", ("delta",)),
}


# Looked for in the decay rule, with several warps and blocks for a head's columns.
IN_SUMS = {
    "halves_in_one_order": Mutation("scan.cuh", "% 2 ? p ^ half : p", "% 2 ? p : p"),
    "sums_of_the_first_warp": Mutation("scan.cuh", "sums[w].x[e] += sums[w + distance].x[e]", "sums[w].x[e] += 0"),
    "one_column_twice": Mutation("scan.cuh", "own = second ? x[i + n / 2] : x[i]", "own = x[i]"),
    "sums_of_the_first_slab": Mutation("forget.cuh", "distance < slabs; distance *= 2", "distance < 1; distance *= 2"),
    "slab_of_another_window": Mutation("forget.cuh", "first + token % tokens", "token % tokens"),
    "gradient_of_the_last_window": Mutation(
        "launch_forget.cuh", "    scan.d_last = {carry.data, carry.head, carry.row, carry.column};\n", ""
    ),
    "state_of_the_first_window": Mutation("forget.cuh", "if (chunk > 0)", "if (chunk > first / kChunk)"),
}


# Looked for in one long sequence.
IN_SEGMENTS = {
    "segments_in_one_order": Mutation("chunk_segments.cuh", "reverse ? segments - 1 - i : i", "i"),
    "transition_transposed": Mutation(
        "chunk_segments.cuh",
        "from[(first_of_transition + j) * kRows]",
        "from[(first_of_transition + row) * kRows + j - row]",
    ),
    "nothing_before_a_segment": Mutation("launch_chunks.cuh", "      pass.initial = memory.matrices(size);\n", ""),
    "gradient_of_the_last_segment_for_all": Mutation(
        "launch_chunks.cuh", "      pass.d_last = memory.matrices(size);\n", ""
    ),
    "identity_one_column_late": Mutation(
        "chunks.cuh", "column - value_columns() == row", "column - value_columns() == row + 1"
    ),
    "nothing_before_a_segment_by_key": Mutation(
        "launch_chunk_keys.cuh", "    pass.initial = memory.segments.matrices(size);\n", ""
    ),
    "ones_one_column_late": Mutation(
        "chunk_keys.cuh", "column == this->value_columns() ? 1", "column == this->value_columns() + 1 ? 1"
    ),
    "decays_without_rest": Mutation("chunk_keys.cuh", "return product + rest;", "return product;"),
    "segment_without_decay": Mutation(
        "chunk_segments.cuh",
        "if (transition == Transition::rows) factor",
        "if (transition == Transition::rows) factor = 1; else factor",
    ),
    "end_of_every_segment_stored_by_key": Mutation(
        "chunk_key_states.cuh", "kReverse ? begin == 0 : end == this->chunks()", "true"
    ),
    "end_of_every_segment_stored": Mutation("chunk_forward.cuh", "else if (end == this->chunks())", "else"),
    "segment_one_chunk_short": Mutation(
        "chunks.cuh",
        "const int64_t next = begin() + chunks_of_segment;",
        "const int64_t next = begin() + chunks_of_segment - 1;",
    ),
}


def mutated(mutation, folder):
    """Return a copy of the kernels with the mistake."""
    kernels = folder / "cuda"
    shutil.copytree(KERNELS, kernels)
    source = kernels / mutation.file
    text = source.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: {mutation.old!r} must occur once"
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return kernels


@pytest.fixture(scope="module")
def cases():
    """Return arguments, gradients and the results of the reference."""
    found = []
    for rule in CASES:
        for shape in SHAPES:
            given, erases = make_case(rule, shape, torch.float64)
            if shape is SHAPES[1]:
                given["first"] = torch.arange(shape[2]).expand(shape[0], -1).remainder(11).eq(5)
            gradients = cotangents_of(given)
            found.append((rule, given, erases, gradients, reference(given, erases, gradients)))
    for rule, shape in (
        ("sum", CHUNK_SHAPE),
        ("delta", CHUNK_SHAPE),
        ("gated_delta", CHUNK_SHAPE),
        ("gla", CHUNK_SHAPE),
        *((rule, CHUNK_SHAPE) for rule in BY_KEY),
        ("gated", HALF_SHAPE),
    ):
        given, erases = make_case(rule, shape, torch.bfloat16)
        if rule in ("gated_delta", "gla", *BY_KEY):  # the state before a chunk still matters after it
            given["decay"] = (1 - 0.05 * torch.rand(given["decay"].shape)).bfloat16()
            given["first"] = torch.arange(shape[2]).eq(70).expand(shape[0], -1).contiguous()
        gradients = cotangents_of(given)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        found.append((rule, given, erases, gradients, truth))
    return found


def faults(emulator, cases, rules=CASES):
    """Return the fault, if any, that the checks of the kernels find."""
    for rule, given, erases, gradients, truth in cases:
        if rule not in rules:
            continue
        for multiprocessors in (132, 1):
            for reverse in (0, 1):
                try:
                    found = emulator.results(given, erases, gradients, multiprocessors=multiprocessors, reverse=reverse)
                except EmulatorError as error:
                    return str(error)
                for name, x in truth.items():
                    limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3}[found[name].dtype]
                    if not relative_error(found[name], x) < limit:
                        return f"{rule}: {name} is wrong"
    return ""


def test_no_mistake_no_fault(cases):
    assert faults(Emulator(build()), cases) == ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistake_is_found(name, cases, tmp_path):
    mutation = MUTATIONS[name]
    part = {"sum": "SUM", "delta": "DELTA"}.get(mutation.rules[0], "FORGET")
    flags = ["-O0", f"-DEMULATOR_{part}"]
    fault = faults(Emulator(build(mutated(mutation, tmp_path), flags=flags, folder=tmp_path)), cases, mutation.rules)
    assert fault and mutation.complaint in fault


@pytest.fixture(scope="module")
def wide_cases():
    """The second one has sums over 32 blocks, in windows of 64 tokens."""
    found = []
    for shape in [(1, 2, 38, 60, 64), (1, 4, 70, 300, 128)]:
        given, erases = make_case("decay", shape, torch.float32)
        gradients = cotangents_of(given)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        found.append(("decay", given, erases, gradients, truth))
    return found


def test_no_mistake_no_fault_in_sums(wide_cases):
    assert faults(Emulator(build()), wide_cases) == ""


@pytest.mark.parametrize("name", IN_SUMS)
def test_mistake_in_sums_is_found(name, wide_cases, tmp_path):
    changed = mutated(IN_SUMS[name], tmp_path)
    assert faults(Emulator(build(changed, flags=["-O1", "-DEMULATOR_FORGET"], folder=tmp_path)), wide_cases)


@pytest.fixture(scope="module")
def long_cases():
    shape, found = (1, 1, 2100, 20, 24), []
    for rule in ("gated_delta", *BY_KEY):
        given, erases = make_case(rule, shape, torch.bfloat16)
        if erases:
            given["rate"] = (0.02 * torch.rand(shape[:3])).bfloat16()
        given["decay"] = (1 - 0.004 * torch.rand(given["decay"].shape)).bfloat16()
        gradients = cotangents_of(given)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        found.append((rule, given, erases, gradients, truth))
    return found


def test_no_mistake_no_fault_in_segments(long_cases):
    assert faults(Emulator(build()), long_cases) == ""


@pytest.mark.parametrize("name", IN_SEGMENTS)
def test_mistake_in_segments_is_found(name, long_cases, tmp_path):
    changed = mutated(IN_SEGMENTS[name], tmp_path)
    assert faults(Emulator(build(changed, flags=["-O1", "-DEMULATOR_FORGET"], folder=tmp_path)), long_cases)


def test_address_sanitizer_watches_shared_memory(tmp_path):
    found = run_watched(mutated(MUTATIONS["slots_overrun"], tmp_path), ("-DEMULATOR_FORGET",), tmp_path)
    assert found.returncode != 0 and "use-after-poison" in found.stderr


def test_address_sanitizer_finds_a_read_beyond_an_input(tmp_path):
    """The numbers are right: the values there are multiplied by zero. Only this check finds it."""
    mutation = Mutation("scan.cuh", "vector.first + i < limit);", "vector.first + i <= limit);")
    found = run_watched(mutated(mutation, tmp_path), ("-DEMULATOR_SUM",), tmp_path)
    assert found.returncode != 0 and "heap-buffer-overflow" in found.stderr


def test_undefined_behavior_sanitizer_finds_an_odd_padding(tmp_path):
    """Lanes read 16 bytes at unaligned addresses: correct on a CPU, and an error on every GPU."""
    mutation = Mutation("chunks.cuh", "kLine = kBlock + 4;", "kLine = kBlock + 3;")
    found = run_watched(mutated(mutation, tmp_path), ("-DEMULATOR_DELTA",), tmp_path)
    assert found.returncode != 0 and "misaligned address" in found.stderr
