"""Mutants of tests/nightly/mutants.txt can be inserted, and every file of the package has tests that find them."""

from collections import Counter

from nightly.run import ROOT, folders_of, mutants


def test_every_mutant_occurs_once():
    found = [(mutant.name, (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.text)) for mutant in mutants()]
    assert [name for name, count in found if count != 1] == []
    assert [mutant.name for mutant in mutants() if mutant.text == mutant.mistake] == []
    assert [name for name, count in Counter(name for name, _ in found).items() if count > 1] == []


def test_every_file_has_tests():
    sources = [*ROOT.glob("fairseq_fwp/**/*.py"), *ROOT.glob("cuda_ext/**/*.[hc]*")]
    tests = {test for path in sources for test in folders_of(str(path.relative_to(ROOT)))}
    assert [test for test in tests if not (ROOT / "tests" / test).exists()] == []
