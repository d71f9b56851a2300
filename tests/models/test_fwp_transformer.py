"""Laws of the translation model: for every map in every position, and every rule of the decoder."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq import options, search
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from support.pairwise import looped
from support.small_models import build_translation as build
from support.small_models import check_half_precision, check_resumed, numbers_in, random_tokens, translation_task

from fairseq_fwp.models import fwp_transformer
from fairseq_fwp.models.fwp_transformer import base_architecture
from fairseq_fwp.models.presets import MT_PRESETS
from fairseq_fwp.modules.attention.normalization import Division
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

SOFTMAX = {"encoder_feature_map": "softmax", "cross_feature_map": "softmax", "decoder_update_rule": "softmax"}
MAPS = list(FEATURE_MAPS)
# One map in all positions.
ALL = {name: dict.fromkeys(("encoder_feature_map", "cross_feature_map", "decoder_feature_map"), name) for name in MAPS}
DELTA = {**ALL["dpfp"], "decoder_update_rule": "delta", "sum_normalization": True}
# Every map in every position, with different maps at a time; every rule with linear attention around it.
KINDS = {
    "softmax": SOFTMAX,
    **{
        f"maps-{name}": {
            "encoder_feature_map": name,
            "cross_feature_map": MAPS[i - 1],
            "decoder_feature_map": MAPS[i - 2],
            "decoder_update_rule": "sum",
        }
        for i, name in enumerate(MAPS)
    },
    **{f"rule-{rule}": {"decoder_update_rule": rule, "sum_normalization": True} for rule in UPDATE_RULES},
    "encoder": {**SOFTMAX, "encoder_feature_map": "dpfp"},
    "cross": {**SOFTMAX, "cross_feature_map": "identity"},
    "decoder": {**SOFTMAX, "decoder_update_rule": "sum", "decoder_feature_map": "relu"},
    "all-biased": {"decoder_update_rule": "sum", "attention_normalization": True, "attention_bias": True},
    "compiled": {"fwp_backend": "auto"},
    "all-attention-normalised": {"decoder_update_rule": "sum", "attention_normalization": True},
}


every_kind = looped("kind", KINDS)


def scores_of(model, source, target):
    """Return log-probabilities (B, L, V) of one forward pass in float64: fairseq's own are float32."""
    return model(source, None, target)[0].log_softmax(-1)


def pad(rows, side, extra=0):
    """Return the rows in one batch, with padding on that side."""
    length = max(map(len, rows)) + extra
    batch = torch.ones(len(rows), length, dtype=torch.long)  # <pad> is 1
    for padded, row in zip(batch, rows, strict=True):
        padded[length - len(row) :] = row if side == "left" else padded[length - len(row) :]
        padded[: len(row)] = row if side == "right" else padded[: len(row)]
    return batch


def steps_of(model, memory, target, state=None, start=0):
    """Return log-probabilities token by token, as the generator requests them."""
    state = {} if state is None else state
    steps = []
    for end in range(start + 1, target.shape[1] + 1):
        steps.append(model.decoder(target[:, :end], encoder_out=memory, incremental_state=state)[0].log_softmax(-1))
    return torch.cat(steps, 1)


def remember(model, source):
    return model.encoder.forward_torchscript({"src_tokens": source, "src_lengths": source.ne(1).sum(1)})


@every_kind
def test_decoding_is_one_pass(kind):
    """Each beam goes on from its own past and source."""
    model = build(**KINDS[kind])
    source, target, state = random_tokens(3, 6), random_tokens(3, 7), {}
    whole = scores_of(model, source, target)
    # From the encoder's output in training too, which has the whole source.
    torch.testing.assert_close(steps_of(model, model.encoder(source), target), whole)
    memory, order = remember(model, source), torch.tensor([2, 2, 0, 1])
    torch.testing.assert_close(steps_of(model, memory, target[:, :4], state), whole[:, :4])
    model.decoder.reorder_incremental_state_scripting(state, order)
    memory = model.encoder.reorder_encoder_out(memory, order)
    torch.testing.assert_close(steps_of(model, memory, target[order], state, start=4), whole[order, 4:])


@every_kind
@looped("side", ["left", "right"])
def test_padding_changes_no_score(kind, side):
    """Padding of source and target, in one forward pass and in decoding, with rows of different lengths.

    fairseq's own attention takes no target with padding on the left: the first row of its mask is empty, and NaN.
    """
    sources, targets = ([random_tokens(n) for n in lengths] for lengths in ((5, 2, 7), (4, 6, 1)))
    model = build(**KINDS[kind])
    expected = [scores_of(model, *(x.unsqueeze(0) for x in pair))[0] for pair in zip(sources, targets, strict=True)]
    source, softmax = pad(sources, side, extra=2), model.decoder.cfg.decoder_update_rule == "softmax"
    for at in ("right",) if softmax else ("left", "right"):
        target = pad(targets, at, extra=1)
        reads = [scores_of(model, source, target)]
        if softmax or at == side:
            reads.append(steps_of(model, remember(model, source), target))
        for found in reads:
            for row, scores in zip(found, expected, strict=True):
                kept = row[len(row) - len(scores) :] if at == "left" else row[: len(scores)]
                torch.testing.assert_close(kept, scores)


RAGGED = pad([random_tokens(n) for n in (6, 3, 4)], "left")


def generate(models, numbers=(0, 1, 2), generator=SequenceGenerator, **settings):
    """Return the hypotheses of fairseq's generator for each row of RAGGED."""
    settings = {"beam_size": 4, "max_len_b": 8, "normalize_scores": False, **settings}
    net_input = {"src_tokens": RAGGED, "src_lengths": RAGGED.ne(1).sum(1)}
    generator = generator(models, models[0].decoder.dictionary, **settings)
    return generator.generate(models, {"id": torch.tensor(numbers), "net_input": net_input})


def rescored(models, hypotheses):
    """Yield each hypothesis, and the scores of its tokens by one forward pass over all of it."""
    for source, beam in zip(RAGGED, hypotheses, strict=True):
        for hypothesis in beam:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens.new_tensor([2]), tokens[:-1]]).unsqueeze(0)  # </s> is 2
            source = source[source.ne(1)]
            scores = [scores_of(single, source.unsqueeze(0), previous)[0].exp() for single in models]
            yield hypothesis, torch.stack(scores).mean(0).gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def check_rescoring(models, **settings):
    for hypothesis, expected in rescored(models, generate(models, **settings)):
        found = hypothesis["positional_scores"].double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@looped("beam", [1, 4])
@looped("kind", ["softmax", "encoder", "cross", "decoder", "rule-delta", "maps-favor"])
def test_beam_scores_equal_rescoring(kind, beam):
    """A kind of every state: decoding and its reordered rows are laws of all kinds above."""
    check_rescoring([build(**KINDS[kind])], beam_size=beam)


def test_scores_of_ensembles_samples_and_penalties_equal_rescoring():
    """Ensembles of different attentions, sampling, and length penalties."""
    check_rescoring([build(**DELTA), build(**SOFTMAX), build(**ALL["favor"])])
    model = build(**DELTA)
    check_rescoring([model], search_strategy=search.Sampling(model.decoder.dictionary))
    for limits in ({"sampling_topk": 5}, {"sampling_topp": 0.8}):
        strategy = search.Sampling(model.decoder.dictionary, **limits)
        for hypothesis, expected in rescored([model], generate([model], search_strategy=strategy)):
            # They are relative to words that may be drawn, and so not smaller.
            assert (hypothesis["positional_scores"].double() >= expected - 1e-5).all()
    for penalty in (0.6, 2.0):
        hypotheses = generate([model], normalize_scores=True, len_penalty=penalty)
        for hypothesis, scores in rescored([model], hypotheses):
            expected = scores.sum() / len(scores) ** penalty
            torch.testing.assert_close(hypothesis["score"].double(), expected, rtol=1e-5, atol=0)


@looped("flags", [SOFTMAX, *({"decoder_update_rule": rule} for rule in UPDATE_RULES), *ALL.values()])
def test_a_hypothesis_costs_as_much_for_any_source_and_any_length_without_softmax(flags):
    model, kept, read = build(**{"decoder_update_rule": "sum", **flags}), [], []
    for length in (4, 20):
        memory, state, target = remember(model, random_tokens(2, length)), {}, random_tokens(2, 6)
        read.append(numbers_in(memory))
        for end in range(1, 7):
            model.decoder(target[:, :end], encoder_out=memory, incremental_state=state)
            kept.append(numbers_in(state))
    if flags is SOFTMAX:
        assert kept[5] > kept[0] and kept[6] > 2 * kept[0] and read[1] > 4 * read[0]
    else:
        assert len(set(kept)) == len(set(read)) == 1 and min(*kept, *read) > 0


def test_no_tensor_grows_faster_than_the_sentence(largest_tensor):
    model = build("delta_dpfp_mt_wmt14_en_de", fwp_backend="auto", dpfp_nu=1, max_target_positions=4096).float()
    largest = {}
    for length in (512, 2048):
        with largest_tensor() as mode, torch.no_grad():
            model(random_tokens(1, length), None, random_tokens(1, length))
        largest[length] = mode.largest
    assert largest[2048] <= 4 * largest[512] < 512**2


STOCK = [
    {},
    {"encoder_normalize_before": True, "decoder_normalize_before": True, "layernorm_embedding": True},
    {"encoder_learned_pos": True, "decoder_learned_pos": True, "no_scale_embedding": True},
    {"no_token_positional_embeddings": True, "share_all_embeddings": False},
]


@looped("flags", STOCK)
def test_softmax_everywhere_is_fairseqs_transformer(flags):
    """It has the same parameters, the same initialisation from one seed, and the same scores."""
    built = []
    for arch, kind in (("transformer", {}), ("fwp_transformer", SOFTMAX)):
        torch.manual_seed(3)
        built.append(build(arch, **kind, **flags))
    theirs, ours = built
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    source, target = pad([random_tokens(5), random_tokens(3)], "left"), random_tokens(2, 6)
    expected = scores_of(theirs, source, target)
    # Our positions are computed in float64, fairseq's in float32.
    torch.testing.assert_close(scores_of(ours, source, target), expected, rtol=1e-5, atol=1e-5)


@looped("arch", ["fwp_transformer", "transformer"])
def test_tied_embeddings_with_an_adaptive_softmax(arch):
    """A checkpoint has the weights of the model, and no more."""
    model = build(arch, adaptive_softmax_cutoff="20,40")
    model.load_state_dict(model.state_dict(), strict=True)


@looped("arch", MT_PRESETS)
def test_presets_have_the_papers_sizes(arch):
    """Sizes are those of Vaswani's base and big model, with 512 features if a map has a choice."""
    args = Namespace(share_all_embeddings=True, encoder_layers=1, decoder_layers=1)
    ARCH_CONFIG_REGISTRY[arch](args)
    stock = Namespace()
    ARCH_CONFIG_REGISTRY["transformer_vaswani_wmt_en_de_big" if arch.endswith("_big") else "transformer"](stock)
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[arch].build_model(args, translation_task())
    for name in ("encoder_embed_dim", "decoder_ffn_embed_dim", "encoder_attention_heads", "dropout"):
        assert getattr(args, name) == getattr(stock, name)
    rule, *rest = arch.removesuffix("_big").removesuffix("_mt_wmt14_en_de").split("_")
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    if rule == "softmax":
        assert not any(hasattr(module, "feature_map") for module in model.modules())
        return
    causal = decoder.self_attn.attention
    assert causal.rule is UPDATE_RULES[rule] and bool(causal.key_normalizations) == (rule == "delta")
    assert bool(causal.memory.normalization) == (rule == "sum")
    for attention in (encoder.self_attn, decoder.encoder_attn, causal):
        assert type(attention.feature_map) is FEATURE_MAPS[rest[0] if rest else "elu"]
        assert attention.feature_map.feature_dim == (512 if rest else 64)
    for m, nu in ((128, 2), (192, 3), (256, 4)):  # Table 6
        assert FEATURE_MAPS["favor"](64, features=m).feature_dim == FEATURE_MAPS["dpfp"](64, nu=nu).feature_dim == 2 * m


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_it_is_trained_saved_and_resumed(checkpoint_activations):
    """Whether activations are computed again does not matter. Every parameter has a gradient."""
    kind = {**ALL["relu"], "decoder_update_rule": "decay", "sum_normalization": True, "dropout": 0.0}
    models = iter([build(**kind, checkpoint_activations=checkpoint_activations), build(**kind)])

    def loss_of(model, batch, state):
        scores = scores_of(model, batch[0], batch[1][:, :-1])
        return torch.nn.functional.nll_loss(scores.transpose(1, 2), batch[1][:, 1:]), state

    batches = [(random_tokens(2, 5), random_tokens(2, 6)) for _ in range(4)]
    check_resumed(lambda: next(models), batches, loss_of=loss_of)


def test_a_copy_reads_with_its_own_attentions():
    """A deep copy, as for exponential moving averages, can change without the model, and works by itself."""
    model = build(**DELTA)
    copied, source, target = copy.deepcopy(model), random_tokens(2, 4), random_tokens(2, 4)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    for each in (model, copied):
        torch.testing.assert_close(steps_of(each, remember(each, source), target), scores_of(each, source, target))


@looped("dtype", [torch.bfloat16, torch.float16])
@looped("name", [name for name, feature_map in FEATURE_MAPS.items() if feature_map.positive])
def test_half_precision_is_close_to_float32(name, dtype):
    model = build(**{**ALL[name], "decoder_update_rule": "delta", "sum_normalization": True})
    source, target = random_tokens(2, 12), random_tokens(2, 12)
    for score in (
        lambda model: scores_of(model, source, target),
        lambda model: steps_of(model, remember(model, source), target),
    ):
        check_half_precision(model, dtype, score, 0.1)


def test_positions_go_on_beyond_any_table():
    """fairseq's table ends at --max-target-positions; ours has no table."""
    model = build(**DELTA, decoder_layers=1, max_target_positions=8)
    source, target = random_tokens(1, 3), random_tokens(1, 40)
    torch.testing.assert_close(steps_of(model, remember(model, source), target), scores_of(model, source, target))


REFUSED = [
    ({"cross_self_attention": True, "no_cross_attention": True}, "must be softmax with --cross-self-attention"),
    ({"quant_noise_pq": 0.1}, "--quant-noise-pq must be 0 unless all three attentions are softmax"),
    ({"encoder_feature_map": "cosine"}, "the feature map must be softmax or one of elu, .*, got 'cosine'"),
    ({"decoder_feature_map": "softmax"}, "the feature map must be one of elu, .*, got 'softmax'"),
    ({"decoder_feature_map": "identity", "sum_normalization": True}, "features must not be negative"),
    *(({f"{side}_attention_heads": 3}, f"--{side}-embed-dim must be divisible by --{side}-attention-heads, got 16 and")
      for side in ("encoder", "decoder")),
    ({"decoder_update_rule": "softmax", "normalization_epsilon": -1.0},
     "--normalization-epsilon must be a number above 0, got -1.0"),
    ({"decoder_update_rule": "hebb"}, "the update rule must be .*, got 'hebb'"),
    ({"decoder_update_rule": "delta_rnn"},
     "--decoder-update-rule must be softmax or one of sum, .*, decay, .* in translation, got delta_rnn"),
]  # fmt: skip


@looped("flags, message", REFUSED)
def test_what_cannot_be_built_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        build(**flags)


def test_layers_are_sharded_as_fairseqs(monkeypatch):
    """Of --ddp-backend fully_sharded: every layer whose activations are computed again, else large ones."""
    asked = []
    monkeypatch.setattr(fwp_transformer, "fsdp_wrap", lambda layer, min_num_params: asked.append(min_num_params))
    for checkpoint_activations in (False, True):
        cfg = {"checkpoint_activations": checkpoint_activations, "offload_activations": False, "min_params_to_wrap": 7}
        fwp_transformer.wrap(torch.nn.Linear(2, 2), Namespace(**cfg))
    assert asked == [7, 0]


def test_what_the_attentions_to_a_whole_sequence_are_built_with():
    sizes = {"encoder_embed_dim": 24, "encoder_attention_heads": 2, "share_all_embeddings": False}
    flags = {"attention_bias": True, "normalization_epsilon": 0.125, "add_normalization_epsilon": True}
    model = build(**sizes, **flags)
    found = model.encoder.layers[0].self_attn, model.decoder.layers[0].encoder_attn
    assert [(x.num_heads, x.q_proj.in_features, x.kv_proj.in_features) for x in found] == [(2, 24, 24), (4, 16, 24)]
    assert all(x.division == Division(0.125, add_epsilon=True) for x in found)
    assert all(part.bias is not None for x in found for part in (x.q_proj, x.kv_proj, x.out_proj))


# scaled: the factor is in the map
@looped("name, scaled, factor", [("elu", False, 4**-0.25), ("favor", False, 4**-0.25), ("favor", True, 1)])
def test_scores_start_as_large_as_those_of_softmax_attention(name, scaled, factor):
    """Softmax divides q . k by sqrt(d) = 4: projections are uniform as in fairseq, times d^(-1/4) each."""
    model = build(encoder_feature_map=name, cross_feature_map=name, favor_softmax_scale=scaled)
    bound = factor * 2**-0.5 * (6 / 32) ** 0.5
    for attention in (model.encoder.layers[0].self_attn, model.decoder.layers[0].encoder_attn):
        for weight in (attention.q_proj.weight, attention.kv_proj.weight[:16]):
            assert 0.9 * bound < weight.abs().max() <= bound


@looped("kind", ["maps-elu", "maps-favor", "cross", "encoder", "softmax"])
def test_an_alignment_is_the_attention_to_the_source(kind):
    """The alignment of a hypothesis is the attention to the source in its own forward pass, as in fairseq's model.

    Weights are only computed after fairseq has announced that they are needed.
    """
    model = build(**KINDS[kind])

    def align(models):
        settings = {"print_alignment": "soft", "beam_size": 2, "normalize_scores": True}
        return generate(models, generator=SequenceGeneratorWithAlignment, **settings)

    if KINDS[kind].get("cross_feature_map") != "softmax":
        assert model(RAGGED[:1], None, random_tokens(1, 4))[1]["attn"] == [None]
        with pytest.raises(ValueError, match="need_attn=True"):
            align([model])
    model.make_generation_fast_(need_attn=True)
    for row, beam in zip(RAGGED, align([model, model]), strict=True):
        for hypothesis in beam:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens.new_tensor([2]), tokens[:-1]]).unsqueeze(0)
            (expected,) = model(row[row.ne(1)].unsqueeze(0), None, previous)[1]["attn"]
            found = torch.tensor([[float(weight) for weight in weights] for weights in hypothesis["alignment"]])
            torch.testing.assert_close(found, expected[0, : len(found)].float(), rtol=0, atol=1e-6)


def test_alignment_with_the_full_context_is_refused():
    model = build(**DELTA)
    with pytest.raises(ValueError, match="--decoder-update-rule must be softmax for alignments"):
        model.decoder(random_tokens(1, 2), encoder_out=model.encoder(random_tokens(1, 3)), full_context_alignment=True)


NORMED = {"sum_normalization": True, "normalization_epsilon": 0.1}
UNUSED = [
    ({"dpfp_nu": 2}, ["--dpfp-nu"]),
    ({"encoder_feature_map": "dpfp", "dpfp_nu": 2}, []),
    ({"attention_dropout": 0.1}, ["--attention-dropout"]),
    ({"attention_dropout": 0.1, "cross_feature_map": "softmax"}, []),
    ({**SOFTMAX, **NORMED}, ["--sum-normalization", "--normalization-epsilon"]),
    ({"decoder_update_rule": "softmax", "normalization_epsilon": 0.1}, []),
    ({**SOFTMAX, "attention_bias": True}, ["--attention-bias"]),
    ({"decoder_update_rule": "softmax", "attention_bias": True}, []),
]


@looped("flags, named", UNUSED)
def test_flags_without_an_effect_are_named(caplog, flags, named):
    caplog.clear()
    build(**flags)
    assert [line.getMessage().split()[0] for line in caplog.records if "no effect" in line.message] == named


def parse(*flags):
    required = ["DATA", "--task", "translation", "--cpu"]
    return options.parse_args_and_arch(options.get_training_parser(), input_args=[*required, *flags])


def test_the_command_line_wins_over_presets_and_both_over_defaults():
    args = parse("--arch", "delta_dpfp_mt_wmt14_en_de_big", "--cross-feature-map", "softmax", "--dpfp-nu", "2")
    found = (args.decoder_update_rule, args.encoder_feature_map, args.decoder_feature_map, args.cross_feature_map)
    assert found == ("delta", "dpfp", "dpfp", "softmax") and args.dpfp_nu == 2
    assert (args.sum_normalization, args.dropout) == (True, 0.3) and not hasattr(args, "attention_normalization")
    assert parse("--arch", "sum_mt_wmt14_en_de").attention_normalization is True
    bare = parse("--arch", "fwp_transformer", "--attention-normalization", "--normalization-epsilon", "0.5")
    assert (bare.attention_normalization, bare.normalization_epsilon) == (True, 0.5)
    base_architecture(bare)
    assert (bare.attention_normalization, bare.sum_normalization, bare.cross_feature_map) == (True, False, "elu")
