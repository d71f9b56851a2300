"""A prompt in a batch, and models that are prepared for inference."""

import copy
from argparse import Namespace

import pytest
from fairseq.tasks.language_modeling import LanguageModelingTask
from models.conftest import build_model  # noqa: F401  (a fixture)
from omegaconf import OmegaConf
from pairwise import looped

PROMPTS = ("", "w1", "w2 w3 w1 w5 w6 w7 w2 w3", "w4 w4", "w3")
SETTINGS = (
    {"min_len": 0, "beam": 1},
    {"min_len": 1},
    {"min_len": 6},
    {"min_len": 6, "sampling": True, "sampling_topk": 1, "beam": 1},
    {"min_len": 7, "diverse_beam_groups": 2, "beam": 4},
    {"max_len_a": 0.5, "max_len_b": 6},
    {"match_source_len": True},
)


@pytest.fixture
def model(build_model):  # noqa: F811
    return build_model("delta_lm_wt103", vocabulary=12)


@looped("settings", SETTINGS)
@looped("bos", [False, True])
def test_a_prompt_does_not_depend_on_its_batch(model, settings, bos):
    """One of them has no start symbol, as the second block of a text in fairseq-generate."""
    dictionary = model.decoder.dictionary
    task = LanguageModelingTask(Namespace(add_bos_token=bos), dictionary)
    settings = {"beam": 2, "min_len": 1, "max_len_b": 14, **settings}
    generator = task.build_generator([model], Namespace(**settings))
    generator.token_indices_to_suppress = dictionary.encode_line("w7", append_eos=False).long()
    lines = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in PROMPTS]
    dataset = task.build_dataset_for_inference(lines, [len(line) for line in lines])
    items = [dataset[index] for index in range(len(lines))]
    items[3] = {**items[3], "net_input.src_tokens": lines[3][:-1], "net_input.src_lengths": len(lines[3]) - 1}

    def generate(items):
        found = task.inference_step(generator, [model], dataset.collater(items))
        return [[(one["tokens"].tolist(), float(one["score"])) for one in hypotheses] for hypotheses in found]

    together = generate(items)
    for number, item in enumerate(items):
        (alone,) = generate([item])
        assert [tokens for tokens, _ in together[number]] == [tokens for tokens, _ in alone]
        assert [score for _, score in together[number]] == pytest.approx([score for _, score in alone])
        assert all(len(tokens) > settings["min_len"] for tokens, _ in alone) or "max_len_a" in settings


def test_a_model_prepared_for_inference_is_evaluated(model):
    model.prepare_for_inference_(OmegaConf.create({"generation": {}}))
    copied = copy.deepcopy(model)
    assert model.eval() is model and copied.eval() is copied is not model
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()
