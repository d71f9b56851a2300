"""The criterion fwp_distillation against plain PyTorch, and refusals."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import looped
from support.small_models import build_model, build_translation, make_dictionary, random_tokens

from fairseq_fwp import distillation
from fairseq_fwp.distillation import DistillationCriterion, attention_error, attentions

PAD = 1


@pytest.fixture
def criterion(monkeypatch):
    """A function criterion(teacher, **settings), for a teacher that is a model."""
    task = Namespace(target_dictionary=make_dictionary(50))

    def make(teacher, **settings):
        monkeypatch.setattr("fairseq_fwp.distillation.read_teacher", lambda path, task: teacher)
        return DistillationCriterion(task, "teacher.pt", **settings)

    return make


@pytest.fixture
def sample():
    """A batch for language models."""
    tokens = random_tokens(3, 8)
    tokens[1, 5:] = PAD
    net_input = {"src_tokens": tokens[:, :-1], "src_lengths": torch.tensor([7, 4, 7])}
    return {"net_input": net_input, "target": tokens[:, 1:]}


def translation_sample():
    source, target = random_tokens(3, 6), random_tokens(3, 5)
    source[0, :2] = PAD
    target[1, 3:] = PAD
    before = torch.cat([target.new_full((3, 1), 2), target[:, :-1]], 1)
    net_input = {"src_tokens": source, "src_lengths": torch.tensor([4, 6, 6]), "prev_output_tokens": before}
    return {"net_input": net_input, "target": target}


def log_probs(model, sample):
    """Return those of all words, for every target but padding."""
    return model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)[sample["target"].ne(PAD)]


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def divergence_of(ours, theirs):
    return F.kl_div(ours, theirs, log_target=True, reduction="sum")


@looped("weight", [1.0, 0.3])
def test_the_distribution_of_a_language_model(criterion, sample, weight):
    student, teacher = build_model("delta_lm_wt103"), build_model("softmax_lm_wt103")
    loss, tokens, log = criterion(teacher, teacher_weight=weight)(student, sample)
    kept, (ours, theirs) = sample["target"].ne(PAD), (log_probs(of, sample) for of in (student, teacher))
    divergence, nll = divergence_of(ours, theirs), F.nll_loss(ours, sample["target"][kept], reduction="sum")
    expected = weight * divergence + (1 - weight) * nll
    assert tokens == kept.sum() == 18
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([log["divergence"], log["nll_loss"]], [divergence.detach(), nll.detach()])
    torch.testing.assert_close(gradients(loss, student), gradients(expected, student))


def test_an_adaptive_softmax_is_compared_cluster_by_cluster(criterion, sample):
    flags = {"adaptive_softmax_cutoff": "10,30"}
    student, teacher = build_model("delta_lm_wt103", **flags), build_model("softmax_lm_wt103", **flags)
    loss, _, log = criterion(teacher)(student, sample)
    target = sample["target"][sample["target"].ne(PAD)]
    probs = [log_probs(of, sample).exp() for of in (student, teacher)]
    # For the head its words and clusters; for a cluster its words, if the target is one of them.
    bounds = [(0, 10), (10, 30), (30, 50)]
    heads = [torch.cat([p[:, :10], *(p[:, a:b].sum(1, keepdim=True) for a, b in bounds[1:])], 1) for p in probs]
    expected = divergence_of(*(head.log() for head in heads))
    for a, b in bounds[1:]:
        rows = (target >= a) & (target < b)
        tails = [(p[rows, a:b] / p[rows, a:b].sum(1, keepdim=True)).log() for p in probs]
        expected = expected + divergence_of(*tails)
    torch.testing.assert_close(loss, expected)
    nll = -probs[0].log().gather(1, target.unsqueeze(1)).sum()
    torch.testing.assert_close(log["nll_loss"], nll.detach())
    assert all(x.isfinite().all() for x in gradients(loss, student) if x is not None)


@looped("arch", ["delta_lm_wt103", "decay_lm_wt103", "gated_delta_lm_wt103", "fwp_xl_lm"])
def test_the_output_of_each_attention_of_a_language_model(criterion, sample, arch):
    flags = {"mem_len": 0} if arch == "fwp_xl_lm" else {}
    student, teacher = build_model(arch, **flags), build_model("softmax_lm_wt103" if not flags else arch, **flags)
    inputs = {}
    for name, module in attentions(teacher).items():
        module.register_forward_hook(lambda _, given, out, name=name: inputs.update({name: (given, out[0])}))
    teacher(**sample["net_input"])
    assert len(inputs) == 2
    layers = attentions(student)
    kept = sample["net_input"]["src_tokens"].ne(PAD)
    errors = ((layers[name](*given)[0] - out.detach())[kept].square().mean() for name, (given, out) in inputs.items())
    expected = sum(errors) / 2
    loss, tokens, _ = criterion(teacher, distillation="attention")(student, sample)
    torch.testing.assert_close(loss, tokens * expected)
    found = gradients(loss, student)
    torch.testing.assert_close(found, gradients(tokens * expected, student))
    learns = {name for (name, _), x in zip(student.named_parameters(), found, strict=True) if x is not None}
    assert learns and all(".self_attn." in name for name in learns)


@looped("distillation", ["attention", "distribution"])
@looped("arch", ["sum_mt_wmt14_en_de", "delta_dpfp_mt_wmt14_en_de", "softmax_mt_wmt14_en_de"])
def test_translation_models_teach_and_learn(criterion, arch, distillation):
    student, teacher = build_translation(arch), build_translation("softmax_mt_wmt14_en_de")
    sample = translation_sample()
    loss, tokens, _ = criterion(teacher, distillation=distillation)(student, sample)
    assert tokens == 13 and loss > 0
    if distillation == "attention":
        assert len(attentions(student)) == 6
    else:
        torch.testing.assert_close(loss, divergence_of(*(log_probs(of, sample) for of in (student, teacher))))
    loss.backward()
    assert any(x.grad is not None for x in student.parameters())
    assert all(x.grad is None for x in teacher.parameters()) or teacher is student


def test_words_that_both_give_no_probability(criterion, sample):
    """Absent words can be targets, such as a line end that a converted vocabulary lacks. The teacher's weight is 1."""
    student, teacher = build_model("delta_lm_wt103"), build_model("softmax_lm_wt103")
    for model in (student, teacher):
        weights = model.state_dict()
        weights["decoder.adaptive_softmax.bias"][sample["target"][0, 0]] = -torch.inf
        model.load_state_dict(weights)
    loss, _, log = criterion(teacher)(student, sample)
    loss.backward()
    assert loss.isfinite() and loss > 0 and log["nll_loss"].isinf()
    assert all(x.grad is None or x.grad.isfinite().all() for x in student.parameters())
    with pytest.raises(ValueError, match="must give a probability to every word that its teacher predicts, got 0"):
        criterion(build_model("softmax_lm_wt103"))(student, sample)


# Flags of the teacher, settings of the criterion, words of the sentence
# fmt: off
WRONG = [
    ({"vocabulary": 40}, {}, "must have the same words in each cluster, got 50 and 40"),
    ({"adaptive_softmax_cutoff": "10"}, {}, "give the teacher's --adaptive-sof"),
    ({"decoder_layers": 3}, {"distillation": "attention"}, "got 2 attentions in the model and 3 in the teacher: give"),
    ({"decoder_embed_dim": 96}, {"distillation": "attention"}, "must take the teacher's vectors, of size 96: give a t"),
    ({}, {"teacher_weight": 2}, r"--teacher-weight must be in \[0, 1\], got 2"),
    ({}, {"ddp_backend": "pytorch_ddp"}, "--ddp-backend must be legacy_ddp with fwp_distillation, got pytorch_ddp"),
    ({}, {"teacher_weight": 0.5, "distillation": "attention"}, "--teacher-weight must be 1 with --distillation atten"),
]
# fmt: on


@looped("flags, settings, sentence", WRONG)
def test_what_does_not_fit(criterion, sample, flags, settings, sentence):
    sample["net_input"]["src_tokens"].clamp_(max=39)
    with pytest.raises(ValueError, match=sentence):
        criterion(build_model("softmax_lm_wt103", **flags), **settings)(build_model("delta_lm_wt103"), sample)


def test_teachers_and_tasks_that_cannot_be(tmp_path):
    words = make_dictionary(50)
    for path, carry, says in (
        ("", False, "--teacher must be a checkpoint to learn from, got none"),
        (str(tmp_path / "none.pt"), False, r"--teacher must be a checkpoint .*, got .*none\.pt"),
        ("", True, "--carry-state must be left out"),
    ):
        with pytest.raises(ValueError, match=says):
            DistillationCriterion(Namespace(target_dictionary=words, args=Namespace(carry_state=carry)), path)


def test_a_task_goes_on_with_its_own_model(monkeypatch):
    """fairseq's translation task uses the model that it built last, which would be the teacher."""
    task = Namespace(target_dictionary=make_dictionary(50), sequence_generator="of the student")

    class Teacher:
        def build(self, task):
            task.sequence_generator = "of the teacher"
            return torch.nn.Linear(1, 1)

    monkeypatch.setattr(distillation, "read", lambda path: Teacher())
    DistillationCriterion(task, "teacher.pt")
    assert task.sequence_generator == "of the student"


def test_attentions_are_those_of_the_model_that_is_wrapped(sample):
    model, wrapped = build_model("delta_lm_wt103"), torch.nn.Module()
    wrapped.module = model
    assert attentions(wrapped) == attentions(model)
    assert attention_error(wrapped, model, sample["net_input"], PAD) < 1e-12


def test_padding_is_not_learned():
    """More padding of source and target does not change the error."""
    student, teacher = (build_translation(f"{name}_mt_wmt14_en_de") for name in ("sum", "softmax"))
    net_input = translation_sample()["net_input"]
    found = attention_error(student, teacher, net_input, PAD)
    source, before = (net_input[name] for name in ("src_tokens", "prev_output_tokens"))
    padded = {
        "src_tokens": torch.cat([source.new_full((3, 4), PAD), source], 1),
        "src_lengths": net_input["src_lengths"],
        "prev_output_tokens": torch.cat([before, before.new_full((3, 2), PAD)], 1),
    }
    torch.testing.assert_close(attention_error(student, teacher, padded, PAD), found)


def test_random_maps_are_drawn_again_in_training():
    student = build_translation("sum_favor_mt_wmt14_en_de")
    sample, teacher = translation_sample(), build_translation("softmax_mt_wmt14_en_de")
    draws = student.encoder.layers[0].self_attn.feature_map
    before = draws.projection.clone()
    attention_error(student, teacher, sample["net_input"], PAD)
    assert torch.equal(draws.projection, before)
    attention_error(student.train(), teacher, sample["net_input"], PAD)
    assert not torch.equal(draws.projection, before)
