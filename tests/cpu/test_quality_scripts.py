"""The quality scripts on settings so small that their figures mean little, but must be sane."""

import json
import sys

import pytest
import torch
from bench.quality import corpus, encoders, gdn_states, kv_codecs, skills, tasks
from bench.quality.harness import known_lines, table

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.model_config import cache_spec


def run_script(module, tmp_path, monkeypatch, *arguments: str) -> dict:
    out = tmp_path / "out.json"
    text = [] if "--window" in arguments else ["--windows", "1", "--window", "256"]
    monkeypatch.setattr(sys, "argv", ["script", *arguments, *text, "--out", str(out)])
    threads = torch.get_num_threads()
    module.main()
    torch.set_num_threads(threads)
    return json.loads(out.read_text())


def test_skills_script_finds_what_the_tiny_hybrid_can(tmp_path, monkeypatch, capsys):
    arguments = ["--weights", "bf16", "--tasks", "2", "--skills", "copy numbers", "tool call"]
    found = run_script(skills, tmp_path, monkeypatch, *arguments)["results"]["bf16"]
    assert found["skills"] == {"copy numbers": 1.0, "tool call": 1.0}
    assert found["wrong"] == []
    bits = found["bits_per_byte"]
    assert all(0.1 < value < 5 for value in bits.values())
    assert bits["Python library (seen)"] < bits["Python"]
    for accepted in found["acceptance"].values():
        shares = accepted["by_position"]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)
        assert accepted["tokens_per_round"] == pytest.approx(1 + sum(shares))
    assert "| bf16 | 1.000 |" in capsys.readouterr().out


def test_codec_script_ranks_codecs_and_finds_a_needle(tmp_path, monkeypatch, capsys):
    arguments = [
        "--kv-dtype",
        "bf16",
        "rk4v4",
        "--lengths",
        "400",
        "--depths",
        "0.5",
        "--needles",
        "1",
        "--encoders",
    ]
    found = run_script(kv_codecs, tmp_path, monkeypatch, *arguments)["codecs"]
    (needle,) = json.loads((tmp_path / "out.json").read_text())["needles"]["bf16"]
    assert needle["right"]
    assert needle["margin"] > 0
    for kind in ("gaussian", "real"):
        assert all(0.98 < value < 0.9999 for value in found["rk4v4"]["cosine"][kind])
        assert all(value > 0.99999 for value in found["bf16"]["cosine"][kind])
    assert 0 <= found["bf16"]["divergence"] < found["rk4v4"]["divergence"] < 0.1
    for kind, bits in found["rk4v4"]["bits_per_byte"].items():
        assert bits == pytest.approx(found["bf16"]["bits_per_byte"][kind], rel=0.05)
    assert "| bf16 | 65,536 | 69,632 |" in capsys.readouterr().out


def test_state_script_compares_states_and_takes_up_where_it_was_cut_short(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "SKILLS", {"tool call": tasks.SKILLS["tool call"]})
    arguments = ["--tasks", "1", "--lengths", "300", "--needles", "1", "--windows", "1", "--window", "64"]
    monkeypatch.setattr(gdn_states, "DEPTHS", [0.5])
    monkeypatch.setattr(corpus, "texts", lambda: {"English": corpus.english()})
    first = run_script(gdn_states, tmp_path, monkeypatch, *arguments)
    assert first["skills"] == {"fp32": 1.0, "bf16": 1.0}
    assert [needle["right"] for needle in first["needles"]["bf16"]] == [True]
    for found in first["text"].values():
        assert found["bf16"] == pytest.approx(found["fp32"], rel=0.05)
        assert found["bf16"] != found["fp32"]
        assert 0 < found["divergence"] < 0.1
    assert "| bf16 |" in capsys.readouterr().out

    ledger = tmp_path / "out.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join(lines[:-1]) + "\n")
    assert run_script(gdn_states, tmp_path, monkeypatch, *arguments) == first
    assert sorted(ledger.read_text().splitlines()) == sorted(lines)


def test_a_line_that_a_run_was_stopped_inside_of_is_measured_again(tmp_path):
    path = tmp_path / "out.jsonl"
    line = json.dumps({"key": "a", "result": "two\u2028lines\x85"}, ensure_ascii=False) + "\n"
    path.write_text(line + '{"key": "b", "res')
    assert dict(known_lines(path)) == {"a": "two\u2028lines\x85"}
    assert path.read_text() == line
    assert dict(known_lines(path)) == {"a": "two\u2028lines\x85"}


def test_bytes_of_a_token_are_those_published():
    spec = cache_spec(GEOMETRIES["qwen3.8-27b"], mtp=True)
    sizes = {"bf16": 65_536, "int8": 33_792, "fp8": 33_024, "rk8v4": 25_600, "rk4v4-e8": 17_408, "rk2v4-e8": 13_312}
    assert {codec: kv_codecs.token_bytes(spec, codec, mtp=False) for codec in sizes} == sizes


@pytest.mark.parametrize("which", ["k", "v"])
def test_other_encoders_are_nearer_through_the_same_decoder(which):
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(1))
    cosines = [kv_codecs.cosine("rk4v4", x, which)]
    for name in encoders.ENCODERS:
        with encoders.replaced(name):
            cosines.append(kv_codecs.cosine("rk4v4", x, which))
    assert cosines == sorted(cosines)
    assert len(set(cosines)) == 3


def test_a_group_of_zeros_stays_zero():
    for encode in encoders.ENCODERS.values():
        codes, scale = encode(torch.zeros(2, 64))
        assert not codes.any()
        assert not scale.any()


@pytest.mark.parametrize("skill", tasks.SKILLS)
def test_tasks_repeat_differ_and_accept_their_answer(skill):
    made = tasks.make_tasks(skill, 5)
    assert made == tasks.make_tasks(skill, 5)
    assert len({json.dumps(task.messages) for task in made}) == 5
    task = made[0]
    thought = "I think.\n</think>\n\n" if task.thinking else ""
    assert task.right(thought + task.expected)
    assert not task.right(thought + task.expected + " Or not.")


def test_tables_are_markdown():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
