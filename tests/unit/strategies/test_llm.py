"""LLMWC against a real HTTP server that is down, slow, wordy, wrong or right, and against real small models."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fedstill.common.config import ConfigError
from fedstill.common.config.files import check
from fedstill.common.models.builtin import builtin_folder
from fedstill.strategies.adafd.llm import LLMConfig, LLMError, ask_for_weights, open_llm, read_numbers

TALK = [{"role": "user", "content": "Three weights, please."}]
KEY = "sk-not-a-real-key-4711"


class Oracle:
    """An OpenAI-compatible endpoint; `answers` are texts, or what to do with the handler instead of answering."""

    def __init__(self) -> None:
        self.answers: list[str | Callable[[BaseHTTPRequestHandler], None]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        oracle = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                oracle.paths.append(self.path)
                self.send_error(405)

            def do_POST(self) -> None:
                oracle.paths.append(self.path)
                oracle.headers.append(dict(self.headers))
                oracle.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer = oracle.answers.pop(0)
                if callable(answer):
                    answer(self)
                    return
                body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Oracle()
    yield made
    made.stop()


def ask(config: LLMConfig) -> tuple[list[float] | None, list[dict[str, Any]]]:
    notes: list[dict[str, Any]] = []
    return ask_for_weights(open_llm(config), TALK, 3, config, lambda **facts: notes.append(facts)), notes


def status(code: int, body: bytes = b"", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_good_answer_is_renormalised_and_noted(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_KEY", KEY)
    oracle.answers = [" 2, 1.0,\n1e0 "]
    weights, notes = ask(LLMConfig(url=oracle.url + "/", model="small", key_name="ORACLE_KEY"))
    assert weights == pytest.approx([0.5, 0.25, 0.25])
    assert notes == [{"attempt": 1, "question": TALK, "answer": " 2, 1.0,\n1e0 ", "weights": weights}]
    assert oracle.paths == ["/v1/chat/completions"]
    assert oracle.asked[0]["messages"] == TALK
    assert oracle.asked[0]["model"] == "small"
    assert oracle.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("Of course! The weights are 0.5, 0.3 and 0.2.", "'Of' is not a number"),
        ("0.5, 0.5", "2 numbers instead of 3"),
        ("0.5, -0.1, 0.6", "-0.1 is below 0"),
        ("0, 0, 0", "do not sum to a number above 0"),
        ("0.5, nan, 0.5", "'nan' is not a number"),
        ("1e999, 1, 1", "do not sum"),
        ("", "0 numbers instead of 3"),
    ],
)
def test_a_bad_answer_is_told_back_and_a_better_one_taken(oracle: Oracle, answer: str, problem: str) -> None:
    oracle.answers = [answer, "[1, 2, 1]"]
    weights, notes = ask(LLMConfig(url=oracle.url, wait=0))
    assert weights == [0.25, 0.5, 0.25]
    assert problem in notes[0]["problem"]
    assert notes[0]["answer"] == answer
    again = oracle.asked[1]["messages"]
    assert again[:2] == [*TALK, {"role": "assistant", "content": answer}]
    assert problem in again[2]["content"]


def test_after_the_retries_there_is_no_answer(oracle: Oracle) -> None:
    oracle.answers = ["no"] * 5
    weights, notes = ask(LLMConfig(url=oracle.url, retries=2, wait=0))
    assert weights is None
    assert [note["attempt"] for note in notes] == [1, 2, 3]
    assert len(oracle.asked) == 3


def test_an_endpoint_that_is_down(oracle: Oracle) -> None:
    url = oracle.url
    oracle.stop()
    weights, notes = ask(LLMConfig(url=url, retries=1, wait=0, timeout=5))
    assert weights is None
    assert [note["answer"] for note in notes] == [None, None]
    assert "refused" in notes[0]["problem"].lower()


def test_an_endpoint_that_is_slow_or_only_drips(oracle: Oracle) -> None:
    over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not over.wait(0.05):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        except OSError:
            pass

    oracle.answers = [lambda handler: over.wait(20) and None, drip]
    began = time.monotonic()
    weights, notes = ask(LLMConfig(url=oracle.url, retries=1, wait=0, timeout=0.5))
    over.set()
    assert weights is None
    assert all("Timeout" in note["problem"] or "timed out" in note["problem"] for note in notes), notes
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (status(500), "status 500"),
        (status(401, b"bad key " + KEY.encode()), "status 401"),
        (status(200, b"<html>"), "no chat completion"),
        (status(200, b'{"choices": []}'), "no chat completion"),
        (status(200, b'{"choices": [{"message": {"content": null}}]}'), "no text"),
        (status(200, b" " * 1_100_000), "no chat completion"),
    ],
)
def test_what_is_no_completion_is_named_without_the_key(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, reply: Callable[[BaseHTTPRequestHandler], None], problem: str
) -> None:
    monkeypatch.setenv("ORACLE_KEY", KEY)
    oracle.answers = [reply]
    weights, notes = ask(LLMConfig(url=oracle.url, retries=0, key_name="ORACLE_KEY"))
    assert weights is None
    assert problem in notes[0]["problem"]
    assert KEY not in json.dumps(notes)


def test_an_answer_that_repeats_the_key_is_noted_without_it(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_KEY", KEY)
    oracle.answers = [f"your key is {KEY}"]
    _, notes = ask(LLMConfig(url=oracle.url, retries=0, key_name="ORACLE_KEY"))
    assert notes[0]["answer"] == "your key is [key]"


def test_a_redirect_does_not_take_the_key_elsewhere(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_KEY", KEY)
    other = Oracle()
    oracle.answers = [status(302, Location=other.url + "/chat/completions")]
    _, notes = ask(LLMConfig(url=oracle.url, retries=0, key_name="ORACLE_KEY"))
    other.stop()
    assert "status 302" in notes[0]["problem"]
    assert other.paths == []


@pytest.mark.parametrize("value", [None, "", "a\nb"])
def test_a_key_that_is_not_there_is_found_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("ORACLE_KEY", raising=False)
    else:
        monkeypatch.setenv("ORACLE_KEY", value)
    with pytest.raises(LLMError, match="the environment variable ORACLE_KEY"):
        open_llm(LLMConfig(url="http://127.0.0.1:1/v1", key_name="ORACLE_KEY"))


@pytest.mark.parametrize(
    ("values", "message"),
    [({}, "say either"), ({"url": "http://a", "local": "b"}, "say either"), ({"url": "file:///etc/passwd"}, "url")],
)
def test_a_configuration_that_names_no_model_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(LLMConfig, values, "[method.llm]")


def test_a_model_of_this_machine_writes_and_nonsense_is_noted() -> None:
    """tiny-t5 has random weights: it says something, and that is no list of numbers."""
    config = LLMConfig(local="tiny-t5", retries=0)
    weights, notes = ask(config)
    assert weights is None
    assert isinstance(notes[0]["answer"], str)
    assert ("not a number" in notes[0]["problem"]) or ("numbers instead of 3" in notes[0]["problem"])


def causal(folder: Path) -> Path:
    """A GPT-2 of one layer with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("tiny-roberta")[0])
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_causal_model_from_a_folder_answers_with_what_it_adds(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(causal(tmp_path))
    answer = open_llm(LLMConfig(local=str(tmp_path))).say(TALK, most_tokens=8)
    assert "Three weights" not in answer
    assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) <= 16


STORIES = Path(__file__).resolve().parents[4] / "shared/weights/llama-stories15m"


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_numbers_only_takes_the_likeliest_number_after_those_before_it(kind: str, tmp_path: Path) -> None:
    folder = causal(tmp_path) if kind == "gpt2" else builtin_folder("tiny-t5")[0]
    config = LLMConfig(local=str(folder), numbers_only=True, retries=0)
    weights, [note] = ask(config)
    assert weights is not None
    said = [float(part) for part in note["answer"].split(", ")]
    assert weights == pytest.approx([number / sum(said) for number in said])
    # the second number by hand: nine whole sequences, scored token by token
    auto = AutoModelForCausalLM if kind == "gpt2" else AutoModelForSeq2SeqLM
    model, tokenizer = auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(TALK[0]["content"] + "\n", return_tensors="pt").input_ids

    def score(text: str) -> float:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        total = 0.0
        for place, token in enumerate(ids):
            with torch.no_grad():
                if kind == "gpt2":
                    logits = model(torch.cat([prompt, torch.tensor([ids[:place]], dtype=torch.long)], 1)).logits[0, -1]
                else:
                    before = torch.tensor([[model.config.decoder_start_token_id, *ids[:place]]])
                    logits = model(input_ids=prompt, decoder_input_ids=before).logits[0, -1]
            total += float(logits.log_softmax(-1)[token])
        return total

    tried = {f"{said[0]}, 0.{tenth}": score(f"{said[0]}, 0.{tenth}") for tenth in range(1, 10)}
    assert note["answer"].startswith(max(tried, key=lambda text: tried[text]))


@pytest.mark.shared
@pytest.mark.skipif(not STORIES.is_dir(), reason="the models under ../shared/weights are not here")
def test_a_real_decoder_only_model_weighs_sites() -> None:
    """A model of children's stories knows nothing of weights: its free answer is of no use, its numbers are."""
    free, [note] = ask(LLMConfig(local=str(STORIES), retries=0))
    assert free is None
    assert note["problem"]
    weights, _ = ask(LLMConfig(local=str(STORIES), numbers_only=True, retries=0))
    assert weights is not None
    assert sum(weights) == pytest.approx(1)


def test_a_model_that_writes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LLMError, match="writes no text"):
        open_llm(LLMConfig(local="tiny-bert"))
    with pytest.raises(LLMError, match=r"no folder with a config.json"):
        open_llm(LLMConfig(local=str(tmp_path)))


def test_numbers_in_a_code_block_are_read() -> None:
    assert read_numbers("```\n0.2; 0.3; 0.5\n```", 3) == [0.2, 0.3, 0.5]
