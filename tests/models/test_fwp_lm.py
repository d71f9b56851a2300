"""Laws of the language model, for every architecture."""

import copy
from argparse import Namespace
from operator import attrgetter

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from pairwise import looped

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.presets import PRESETS
from fairseq_fwp.modules.layers import Dropout
from fairseq_fwp.modules.update_rules import UPDATE_RULES

from .conftest import SMALL, configure, log_probs, make_dictionary, random_tokens

ARCHS = [arch for arch in PRESETS if not arch.endswith("_medium")]


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


@looped("cutoffs", [None, "10,30"])
@looped("positions", [True, False])
def test_incremental_equals_teacher_forced(build_model, arch, cutoffs, positions):
    model = build_model(arch, adaptive_softmax_cutoff=cutoffs, no_token_positional_embeddings=not positions)
    tokens = random_tokens(3, 7)
    whole = log_probs(model, tokens)
    state = {}
    steps = [log_probs(model, tokens[:, : t + 1], incremental_state=state) for t in range(tokens.shape[1])]
    assert all(step.shape[1] == 1 for step in steps)
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_a_prompt_is_read_in_one_pass(build_model, arch):
    model, tokens, state = build_model(arch), random_tokens(2, 8), {}
    pieces = [log_probs(model, tokens[:, :end], incremental_state=state) for end in (5, 6, 8)]
    assert [piece.shape[1] for piece in pieces] == [5, 1, 2]
    torch.testing.assert_close(torch.cat(pieces, 1), log_probs(model, tokens))


def test_the_state_is_a_value_that_can_be_passed_on(build_model, arch):
    model, tokens = build_model(arch), random_tokens(2, 8)
    _, extra = model(tokens[:, :5])
    torch.testing.assert_close(
        log_probs(model, tokens[:, 5:], state=extra["state"].detach()), log_probs(model, tokens)[:, 5:]
    )


def test_reordered_beams_go_on_from_their_own_past(build_model, arch):
    model, tokens, state = build_model(arch), random_tokens(3, 6), {}
    log_probs(model, tokens[:, :5], incremental_state=state)
    order = torch.tensor([2, 2, 0])
    model.decoder.reorder_incremental_state_scripting(state, order)
    step = log_probs(model, tokens[order], incremental_state=state)
    torch.testing.assert_close(step, log_probs(model, tokens[order])[:, -1:])


@looped("side", ["left", "right"])
def test_padding_changes_no_score(build_model, arch, side):
    model, tokens = build_model(arch), random_tokens(2, 6)
    pad = tokens.new_full((2, 3), model.decoder.padding_idx)
    padded = torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1)
    scores = log_probs(model, padded)
    torch.testing.assert_close(scores[:, 3:] if side == "left" else scores[:, :6], log_probs(model, tokens))


@pytest.mark.parametrize("rule", ["softmax", *UPDATE_RULES])
def test_rows_of_different_lengths(build_model, rule):
    """Padding on the left, on the right and between tokens of each row, then decoding with exchanged rows."""
    model = build_model("fwp_lm", decoder_update_rule=rule, sum_normalization=rule != "softmax")
    pad, rows = model.decoder.padding_idx, [random_tokens(n) for n in (7, 3, 5, 1)]
    batch = torch.full((4, 9), pad)
    places = [torch.arange(9)[2:], torch.arange(9)[:3], torch.tensor([0, 1, 4, 5, 8]), torch.tensor([8])]
    for row, (place, tokens) in enumerate(zip(places, rows, strict=True)):
        batch[row, place] = tokens
    scores = log_probs(model, batch)
    for row, (place, tokens) in enumerate(zip(places, rows, strict=True)):
        torch.testing.assert_close(scores[row, place], log_probs(model, tokens.unsqueeze(0))[0])
    state = {}
    log_probs(model, batch, incremental_state=state)
    order, more = torch.tensor([2, 0, 3]), random_tokens(3, 1)
    model.decoder.reorder_incremental_state_scripting(state, order)
    step = log_probs(model, torch.cat([batch[order], more], 1), incremental_state=state)
    for row, source in enumerate(order):
        whole = torch.cat([rows[source], more[row]]).unsqueeze(0)
        torch.testing.assert_close(step[row], log_probs(model, whole)[0, -1:])


def test_a_checkpoint_of_an_earlier_version_is_built_with_the_defaults_of_new_options():
    config = OmegaConf.to_container(configure("delta_lm_wt103", **SMALL))
    for name in ("decoder_key_dim", "norm_read_out", "favor_draw"):
        del config[name]
    config = OmegaConf.create(config)
    OmegaConf.set_struct(config, True)
    model = FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(50)))
    assert model.decoder.layers[0].self_attn.read_out_norm is None and "norm_read_out" not in config


def test_local_attention_decodes_in_constant_memory(build_model):
    """With --attention-window, a layer keeps one token less than the window."""
    model, tokens, state = build_model("softmax_lm_wt103", attention_window=3), random_tokens(2, 12), {}
    whole = log_probs(model, tokens)
    steps = [log_probs(model, tokens[:, : t + 1], incremental_state=state) for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    ((kept, _read),) = state.values()
    assert [layer.keys.shape[2] for layer in kept.layers] == [2, 2]
    changed = tokens.clone()
    changed[:, 0] ^= 1
    seen = (log_probs(model, changed) != whole).any(-1)[0].nonzero().flatten().tolist()
    assert seen == [0, 1, 2, 3, 4]  # 2 tokens further through each of 2 layers


def test_adaptive_inputs_of_any_model(build_model):
    model = build_model("delta_lm_wt103", div_val=2, adaptive_softmax_cutoff="10,30")
    tokens, state = random_tokens(2, 6), {}
    steps = [log_probs(model, tokens[:, : t + 1], incremental_state=state) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), log_probs(model, tokens))
    assert [table.embedding_dim for table in model.decoder.embed_tokens.tables] == [16, 8, 4]


def test_decoding_goes_on_from_a_given_state(build_model, arch):
    model, tokens, state = build_model(arch), random_tokens(2, 9), {}
    past = model(tokens[:, :4])[1]["state"]
    steps = [log_probs(model, tokens[:, 4 : t + 1], incremental_state=state, state=past) for t in range(4, 9)]
    torch.testing.assert_close(torch.cat(steps, 1), log_probs(model, tokens)[:, 4:])


FAVOR = {"decoder_feature_map": "favor"}


@looped(
    ("flags", "attribute", "value"),
    [
        ({"decoder_key_dim": 5}, "key_dim", 5),
        ({"sum_normalization": True}, "sum_normalization.epsilon", 1e-6),
        ({"attention_normalization": True}, "attention_normalization.read_out_only", False),
        (
            {"attention_normalization": True, "attention_normalization_read_out_only": True},
            "attention_normalization.read_out_only",
            True,
        ),
        ({"sum_normalization": True, "normalization_epsilon": 0.5}, "sum_normalization.epsilon", 0.5),
        ({"sum_normalization": True, "sum_normalization_epsilon": 0.25}, "sum_normalization.epsilon", 0.25),
        ({"sum_normalization": True, "add_normalization_epsilon": True}, "sum_normalization.add_epsilon", True),
        ({"attention_normalization": True, "normalization_epsilon": 0.5}, "attention_normalization.epsilon", 0.5),
        ({"attention_normalization": True, "sum_normalization_epsilon": 0.5}, "attention_normalization.epsilon", 1e-6),
        ({"scale_read_out": True}, "scale", 0.5),
        ({"norm_read_out": True}, "read_out_norm.normalized_shape", (4,)),
        ({"fwp_backend": "kernel"}, "backend", "kernel"),
        ({**FAVOR, "favor_draw": "gaussian"}, "feature_map.draw", "gaussian"),
        ({**FAVOR, "favor_features": 3, "decoder_key_dim": 5}, "feature_map.projection.shape", (3, 5)),
        ({**FAVOR, "favor_offset": 0.125}, "feature_map.offset", 0.125),
        ({**FAVOR, "favor_redraw": 7}, "feature_map.redraw", 7),
        ({**FAVOR, "favor_softmax_scale": True, "decoder_key_dim": 16}, "feature_map.scale", 0.5),
        ({"decoder_feature_map": "relu", "relu_features": 7}, "feature_map.feature_dim", 7),
        ({"decoder_feature_map": "dpfp", "dpfp_nu": 3}, "feature_map.feature_dim", 2 * 4 * 3),
    ],
)
def test_flags_reach_the_layer(build_model, flags, attribute, value):
    assert attrgetter(attribute)(build_model("fwp_lm", **flags).decoder.layers[0].self_attn) == value


def test_favor_draws_once_a_mini_batch_in_training_and_never_in_evaluation(build_model):
    model, tokens = build_model("delta_favor_lm_wt103"), random_tokens(2, 5)
    maps = [layer.self_attn.feature_map for layer in model.decoder.layers]
    model(tokens)
    assert [int(feature_map.draws) for feature_map in maps] == [1, 1]
    model.train()(tokens)
    model(tokens)
    assert [int(feature_map.draws) for feature_map in maps] == [3, 3]


def test_learned_maps_keep_their_own_initialisation(build_model):
    model = build_model("sum_lm_wt103", decoder_feature_map="relu").float()
    model.apply(initialize)
    assert model.decoder.layers[0].self_attn.feature_map.linear.weight.std() > 0.1  # not N(0, 0.02)


@looped("beam", [1, 4])
def test_beam_search_scores_equal_rescoring(build_model, arch, beam):
    """The generator's scores, step by step, are those of one forward pass on the same tokens."""
    model = build_model(arch)
    dictionary: Dictionary = model.decoder.dictionary
    prompts = random_tokens(2, 3)
    prompts[1, 2] = dictionary.pad()  # a shorter prompt in the same batch
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=9, normalize_scores=False, eos=dictionary.eos()
    )
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.tensor([3, 2])}}
    for prompt, hypotheses in zip(prompts, generator.generate([model], sample, prefix_tokens=prompts), strict=True):
        prompt = prompt[prompt.ne(dictionary.pad())].tolist()
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            assert tokens[: len(prompt)].tolist() == prompt
            inputs = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens[:-1]]).unsqueeze(0)
            rescored = log_probs(model, inputs)[0].gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(hypothesis["positional_scores"].double(), rescored, rtol=1e-5, atol=1e-5)


def test_decoding_memory_is_constant_for_every_rule(build_model):
    for rule in UPDATE_RULES:
        model, tokens, state, sizes = build_model("fwp_lm", decoder_update_rule=rule), random_tokens(2, 12), {}, []
        for t in range(12):
            model(tokens[:, : t + 1], incremental_state=state)
            ((kept, _read),) = state.values()
            sizes.append(sum(part.numel() for layer in kept.layers for part in layer if part is not None))
        assert len(set(sizes)) == 1
    model, state = build_model("softmax_lm_wt103"), {}
    model(tokens, incremental_state=state)
    ((kept, _read),) = state.values()
    assert kept.layers[0].keys.shape[2] == 12


@pytest.mark.parametrize("arch", ["delta_lm_wt103", "sum_lm_wt103"])
def test_no_tensor_grows_faster_than_the_sequence(build_model, largest_tensor, arch):
    model = build_model(arch, fwp_backend="auto", max_target_positions=8192)
    largest = {}
    for length in (1024, 4096):
        with largest_tensor() as mode, torch.no_grad():
            model(random_tokens(1, length))
        largest[length] = mode.largest
    assert largest[4096] <= 4 * largest[1024] < 1024**2


@looped("normalize_before", [False, True])
def test_softmax_model_is_fairseqs_transformer_lm(build_model, normalize_before):
    """The baseline with fairseq's weights gives fairseq's logits: embedding, positions, layers, norms, output."""
    shared = {"decoder_normalize_before": normalize_before, "activation_fn": "gelu"}
    ours = build_model("softmax_lm_wt103", **shared)
    dictionary = ours.decoder.dictionary
    flags = {
        **SMALL, **shared, "decoder_output_dim": 16, "decoder_input_dim": 16, "share_decoder_input_output_embed": True,
        "tokens_per_sample": 64, "max_target_positions": 64, "add_bos_token": False, "tpu": False,
    }  # fmt: skip
    config = OmegaConf.merge(OmegaConf.structured(TransformerLanguageModelConfig), flags)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    theirs = TransformerLanguageModel.build_model(config, task).double().eval()
    with torch.no_grad():
        theirs.decoder.embed_tokens.weight.copy_(ours.decoder.embed_tokens.weight)
        ours.decoder.adaptive_softmax.bias.zero_()
        if normalize_before:
            theirs.decoder.layer_norm.load_state_dict(ours.decoder.layer_norm.state_dict())
        for mine, other in zip(ours.decoder.layers, theirs.decoder.layers, strict=True):
            attention = other.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            for part, projection in zip(mine.self_attn.in_proj.weight.chunk(3), projections, strict=True):
                projection.weight.copy_(part)
                projection.bias.zero_()
            attention.out_proj.weight.copy_(mine.self_attn.out_proj.weight)
            attention.out_proj.bias.zero_()
            for name in ("self_attn_layer_norm", "final_layer_norm", "fc1", "fc2"):
                getattr(other, name).load_state_dict(getattr(mine, name).state_dict())
    tokens = random_tokens(3, 50)
    # fairseq's sinusoidal table is float32 arithmetic of another order than a float64 model
    expected = theirs(tokens)[0].log_softmax(-1)
    torch.testing.assert_close(log_probs(ours, tokens), expected, rtol=1e-6, atol=1e-6)


def test_positions_go_on_beyond_the_table(build_model):
    """fairseq's table starts with 1,024 rows; decoding goes beyond it as one forward pass does."""
    model = build_model("sum_lm_wt103", decoder_layers=1, max_target_positions=2000)
    tokens, state = random_tokens(1, 1030), {}
    log_probs(model, tokens[:, :1020], incremental_state=state)
    steps = [log_probs(model, tokens[:, :t], incremental_state=state) for t in range(1021, 1031)]
    expected = log_probs(copy.deepcopy(model), tokens)[:, -10:]
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    rotated = model.decoder.embed_positions(torch.tensor([[1500, 3]]))
    assert not torch.allclose(rotated[0, 0], rotated[0, 1])


@looped("normalize_before", [False, True])
@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model(build_model, arch, normalize_before, dtype):
    """Scores are close to float32, the state is float32, and the loss of a large batch does not overflow."""
    model = build_model(arch, decoder_normalize_before=normalize_before).float()
    model.apply(initialize)
    tokens = random_tokens(2, 12)
    expected = log_probs(model, tokens)
    half = copy.deepcopy(model).to(dtype)
    features, extra = half(tokens)
    assert features.dtype == torch.float32 and log_probs(half, tokens).dtype == torch.float32
    torch.testing.assert_close(log_probs(half, tokens), expected, rtol=0, atol=0.05)
    if arch != "softmax_lm_wt103":
        assert all(part is None or part.dtype == torch.float32 for part in extra["state"].layers[0])
    logits, targets = half.decoder.adaptive_softmax(features.repeat(900, 1, 1), tokens.repeat(900, 1))
    loss = features.new(1).zero_() + torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
    assert loss.isfinite() and loss > 65504  # the largest number of float16


@looped("cutoffs", [None, "10,30"])
def test_adaptive_loss_and_cross_entropy_agree(build_model, cutoffs):
    """fairseq's criteria on targets with every word: both count all of them."""
    model = build_model("delta_lm_wt103", adaptive_softmax_cutoff=cutoffs)
    task = Namespace(target_dictionary=model.decoder.dictionary)
    target = torch.arange(4, 50).unsqueeze(0)
    sample = {
        "net_input": {"src_tokens": target.flip(1), "src_lengths": torch.tensor([46])},
        "target": target, "ntokens": 46, "nsentences": 1,
    }  # fmt: skip
    losses = [
        criterion(model, sample)[0].item()
        for criterion in (AdaptiveLoss(task, sentence_avg=False), CrossEntropyCriterion(task, sentence_avg=False))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@looped("cutoffs", [None, "10,30"])
def test_temperature_divides_the_scores_of_words(build_model, cutoffs):
    model = build_model("delta_lm_wt103", adaptive_softmax_cutoff=cutoffs)
    tokens = random_tokens(2, 5)
    scores, extra = model(tokens, incremental_state={})
    tempered = model.get_normalized_probs((scores / 0.5, extra), log_probs=True)
    torch.testing.assert_close(tempered, (log_probs(model, tokens) / 0.5).log_softmax(-1))


def test_initialisation_is_the_documented_one(build_model):
    model = build_model("delta_lm_wt103", vocabulary=2000, decoder_embed_dim=64).float()
    torch.nn.init.uniform_(model.decoder.layers[0].fc1.bias)
    model.apply(initialize)
    assert model.decoder.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for layer in model.decoder.layers:
        for linear in (layer.fc1, layer.fc2, layer.self_attn.in_proj, layer.self_attn.out_proj):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert layer.fc1.bias.abs().max() == 0
        assert layer.final_layer_norm.weight.mean().item() == pytest.approx(1, abs=0.02)
        assert 0.01 < layer.final_layer_norm.weight.std().item() < 0.03


def test_a_new_model_is_initialised():
    task = Namespace(target_dictionary=make_dictionary(500))
    model = FwpLanguageModel.build_model(configure("delta_lm_wt103", **SMALL), task)
    assert model.decoder.embed_tokens.weight[2:].std().item() == pytest.approx(0.02, rel=0.1)
    assert model.decoder.embed_tokens.weight[model.decoder.padding_idx].abs().max() == 0
    assert model.decoder.layers[1].fc1.weight.std().item() == pytest.approx(0.02, rel=0.2)


@looped("flag", ["dropout", "activation_dropout", "attention_dropout", "final_dropout"])
def test_each_dropout_acts_in_training_alone(build_model, flag):
    off = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0}
    model = build_model("softmax_lm_wt103", **{**off, flag: 0.5})
    tokens = random_tokens(2, 9)
    expected = log_probs(build_model("softmax_lm_wt103", **off), tokens)
    assert torch.equal(log_probs(model, tokens), log_probs(model, tokens))
    assert expected.shape == log_probs(model, tokens).shape
    model.train()
    assert not torch.allclose(log_probs(model, tokens), log_probs(model, tokens))


def test_dropout_is_where_the_paper_has_it(build_model):
    """It is after the embedding and after both blocks of every layer, and in three more places on request."""
    model = build_model("delta_lm_wt103", dropout=0.25, activation_dropout=0.125, final_dropout=0.5)
    calls = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(module.p))
    model(random_tokens(1, 3))
    assert calls == [0.25] + [0.25, 0.125, 0.25] * 2 + [0.5]


@looped("cutoffs, kept", [("", []), ("20, 30", [20, 30]), ("20,50", [20]), ("20,51", [20])])
def test_cutoffs(build_model, cutoffs, kept):
    model = build_model("delta_lm_wt103", adaptive_softmax_cutoff=cutoffs)
    assert model.decoder.adaptive_softmax.bounds == [0, *kept, 50]


@looped("cutoffs", ["abc", "10;20", "5.5", "10,,x"])
def test_cutoffs_that_are_no_numbers_are_refused(build_model, cutoffs):
    with pytest.raises(ValueError, match="must be whole numbers such as 20000,40000, got"):
        build_model("delta_lm_wt103", adaptive_softmax_cutoff=cutoffs)


def test_cutoffs_beyond_the_vocabulary_are_dropped_with_one_line(build_model, caplog):
    with caplog.at_level("INFO"):
        model = build_model("delta_lm_wt103", vocabulary=25_000)
    assert model.decoder.adaptive_softmax.bounds == [0, 20_000, 25_000]
    lines = [record.message for record in caplog.records if "dropped" in record.message]
    assert lines == ["adaptive softmax: dropped cutoffs 40000,200000, beyond the vocabulary of 25000 words"]


def test_it_learns_what_needs_its_memory(build_model):
    """The last target is the first token, one of eight: without a memory the loss is at least log 8."""
    model = build_model("delta_lm_wt103", decoder_embed_dim=32, dropout=0.0, fwp_backend="auto").float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        tokens = torch.cat([torch.randint(4, 12, (16, 1)), torch.randint(12, 20, (16, 5))], 1)
        loss = torch.nn.functional.nll_loss(log_probs(model, tokens)[:, -1], tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 < torch.tensor(8.0).log()


@pytest.mark.parametrize(
    ("arch", "flags", "unused"),
    [
        ("delta_lm_wt103", {"dpfp_nu": 2}, ["--dpfp-nu"]),
        ("sum_favor_lm_wt103", {"decoder_feature_map": "elu"}, ["--favor-features"]),
        ("softmax_lm_wt103", {"sum_normalization": True}, ["--sum-normalization"]),
        ("delta_lm_wt103", {"attention_dropout": 0.5}, ["--attention-dropout"]),
        ("decay_lm_wt103", {"normalization_epsilon": 0.1}, ["--normalization-epsilon"]),
        (
            "sum_lm_wt103",
            {"attention_normalization_read_out_only": True},
            ["--attention-normalization-read-out-only"],
        ),
        ("delta_dpfp_lm_wt103", {"dpfp_nu": 2}, []),
        ("softmax_lm_wt103", {"attention_window": 3}, []),
        ("delta_lm_wt103", {"attention_window": 3}, ["--attention-window"]),
        ("softmax_lm_wt103", {}, []),
    ],
)
def test_flags_without_effect_are_named(build_model, caplog, arch, flags, unused):
    build_model(arch, **flags)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split()[0] for message in warnings] == unused


@looped(
    ("flag", "value"),
    [
        ("decoder_embed_dim", 0),
        ("decoder_ffn_embed_dim", 0),
        ("decoder_layers", -1),
        ("attention_dropout", 2.0),
        ("final_dropout", -0.5),
        ("dropout", -0.1),
    ],
)
def test_sizes_and_probabilities_are_checked(build_model, flag, value):
    with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} .* got {value}$"):
        build_model("softmax_lm_wt103", **{flag: value})
