"""Claims about the checked reading list: its verdicts follow from its numbers, and a falsified number is found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.reading import Claim, Verdict, Written, claims, not_checked
from workbench.reading.report import HEADER, by_verdict, markdown, plain, row

RIGHT, ROUNDED, DEPENDS, WRONG = Verdict
EXPECTED = {  # all others are right
    WRONG: {
        "rows-1000-after-2000",
        "flops-by-bytes",
        "44-times",
        "llama-2-mqa",
        "70b-heads",
        "q2_k",
        *(f"tokens-a-round-{K}-{alpha}-printed" for K in (4, 8) for alpha in ("0.7", "0.8", "0.9", "0.95")),
        "minitron-cheaper",
        "mixtral-8x7",
        "all-reduces",
        "nvlink-pcie",
        "cache-llama-3.1-405b-128000",
        "few-passes-fast",
    },
    DEPENDS: {
        "opt-13b-token",
        "mla-67b",
        "blocks-waste",
        "int4-gain",
        "padding",
        "opt-66b-transfer",
        "opt-66b-link",
        "opt-175b-weights",
        "opt-175b-cache",
        "minitron-8b",
        "minitron-4b",
        "deepseek-v2-lite-active",
        "cache-mixtral-8x7b-262144",
        "cache-llama-2-7b-262144",
        "cache-llama-3.1-8b-128000",
        "cache-mamba-130m-8192",
        "cache-gpt2-8192",
    },
    ROUNDED: {"ridge-a100-80gb", "opt-13b-request", "deepseek-v3-active", "few-passes-roofline"},
}


@pytest.fixture(scope="module")
def every() -> list[Claim]:
    """Each computed once."""
    return [replace(claim, compute=claim.values().copy) for claim in claims()]


def test_there_are_more_than_a_hundred_each_with_a_source_and_a_computation_and_a_name_of_its_own(every):
    assert len(every) >= 100 and len({claim.name for claim in every}) == len(every)
    assert len({claim.says for claim in every}) == len(every)
    assert all(claim.says and claim.source and claim.how and 0 <= claim.lab <= 15 for claim in every)
    assert {claim.lab for claim in every} >= {*range(1, 7), *range(8, 15)}


def test_the_verdicts_are_those_that_a_reader_expects(every):
    names = {verdict: {claim.name for claim in every if claim.verdict() is verdict} for verdict in Verdict}
    assert {verdict: names[verdict] for verdict in EXPECTED} == EXPECTED
    assert len(names[RIGHT]) == len(every) - sum(map(len, EXPECTED.values()))
    assert by_verdict(every) == {verdict: len(of_it) for verdict, of_it in names.items()}


def test_a_number_that_is_falsified_is_wrong(every):
    for claim in every:
        low = max(claim.values().values()) * 3 + 7
        false = replace(claim, published=f"{low:.2f}", about=0.0)
        assert false.verdict() is WRONG, claim.name


@pytest.mark.parametrize(
    ("published", "values", "verdict"),
    [
        ("0.78", [0.7812], RIGHT),
        ("0.78", [0.785], RIGHT),
        ("0.78", [0.7851], ROUNDED),
        ("0.78", [0.796], WRONG),
        ("154", [153.01], ROUNDED),
        ("1", [2.0], WRONG),  # one unit of the last digit, and twice as much
        ("2,500,500", [2_499_500], WRONG),
        ("5 to 6", [5.29], RIGHT),
        ("5 to 6", [6.6], WRONG),
        ("30 to 70", [34, 50, 95], DEPENDS),
        ("≤ 4", [0.1, 4.2], RIGHT),
        ("≤ 4", [7.0, 1.0], DEPENDS),
        ("93.3", [93.34, 82.2], DEPENDS),
        ("93.3", [50, 82.2], WRONG),
        ("12", [12.1, 11.9], RIGHT),
        ("0", [0.0], RIGHT),
        ("0", [0.3], RIGHT),
        ("0", [1.0], WRONG),
    ],
)
def test_a_verdict_follows_from_the_digits(published, values, verdict):
    by_condition = {str(at): float(value) for at, value in enumerate(values)}
    claim = Claim("a", 1, "a number", "somewhere", published, "", "a sum", lambda: by_condition)
    assert claim.verdict() is verdict


def test_words_like_about_allow_what_they_say():
    claim = Claim("a", 1, "about five", "somewhere", "5", "", "a sum", lambda: 5.6, about=0.12)
    assert claim.verdict() is RIGHT and replace(claim, about=0.11).verdict() is WRONG


@pytest.mark.parametrize("text", ["", "many", "about 5", "1e3", "5-6", "< 4", "-3", "5 to", "1.2.3"])
def test_a_number_that_is_written_otherwise_is_refused(text):
    with pytest.raises(WorkbenchError, match="a published number is written like"):
        Written.of(text)
    with pytest.raises(WorkbenchError, match="a published number is written like"):
        Claim("a", 1, "a number", "somewhere", text, "", "a sum", lambda: 1.0)


def test_the_page_has_all_of_them_and_what_was_not_checked(every):
    page = markdown(every, not_checked())
    assert all(claim.says.replace("|", "\\|") in page and claim.source in page for claim in every)
    assert all(one.says in page and one.why in page for one in not_checked())
    with_bars = replace(every[0], says="p(a | b)", source="|x|")
    assert "| p(a \\| b) |" in markdown([with_bars], []) and "| \\|x\\| |" in markdown([with_bars], [])
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in table} == {len(HEADER) - 1, 3}


def test_the_command_prints_them_as_text_as_json_and_as_a_page(every, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("workbench.reading.claims", lambda: every)
    assert cli.main(["reading", "--verdict", "wrong"]) == 0
    said = capsys.readouterr().out
    assert said.count("wrong    lab") == len(EXPECTED[WRONG]) and f"{len(EXPECTED[WRONG])} wrong" in said
    assert cli.main(["reading", "--lab", "13", "--json"]) == 0
    of_lab = json.loads(capsys.readouterr().out)
    assert of_lab == json.loads(json.dumps([plain(claim) for claim in every if claim.lab == 13]))
    assert cli.main(["reading", "--markdown", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == markdown(every, not_checked())
    assert len(row(every[0])) == len(HEADER)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--verdict", "rigth"], "did you mean 'right'"),
        (["--lab", "7"], "no published number of lab 7"),
        (["--lab", "x"], ""),
    ],
)
def test_a_wrong_question_is_answered_with_what_there_is(given, words, every, monkeypatch, capsys):
    monkeypatch.setattr("workbench.reading.claims", lambda: every)
    try:
        code = cli.main(["reading", *given])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and words in said.err and not said.out
