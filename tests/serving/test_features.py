"""What SGLang's API offers, with drafts verified: each answer is plain decoding's own.

The README's table "What requests may use" is this file's, line for line.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from servers import PLAIN, PROMPT, serving
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["list", "table", "number"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Every request verifies 12 drafted tokens a round, whether or not that pays."""
    with serving(
        tmp_path_factory.mktemp("features") / "server.log",
        *("--libraspec-policy", "static", "--libraspec-static-length", "12"),
        *("--enable-custom-logit-processor", "--enable-priority-scheduling"),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def both(server, **sampling):
    """(ours, plain): the answers with drafts and without."""
    ours, plain = (
        server.generate(**sampling, **extra).json() for extra in ({}, {"custom_params": PLAIN})
    )
    assert ours["text"] == plain["text"]
    return ours, plain


FOLLOWING = (
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"min_new_tokens": 12, "stop_token_ids": [10, 32]},
    {"logit_bias": {"32": -3.0, "101": 2.0}},
    {"stop": ["return", "self"]},
    {"ignore_eos": True, "max_new_tokens": 80},
    {"regex": r"[a-z]{3,8} = \d{2,9};( # [a-z ]{1,30})?"},
    {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 90},
    {"ebnf": 'root ::= "def " [a-z]+ "(" [a-z]* "):"'},
    {"regex": r"[a-f ]{20,40}", "repetition_penalty": 1.1, "logit_bias": {"97": 1.0}},
)


@pytest.mark.parametrize("sampling", FOLLOWING, ids=lambda s: "-".join(s))
def test_drafts_are_verified_and_nothing_else_changes(server, sampling):
    ours, _ = both(server, **sampling)
    if ours["meta_info"]["completion_tokens"] > 1:
        assert ours["meta_info"]["spec_cap_length"] > 2


def test_they_mix_in_one_batch(server):
    plain = [server.generate(**s, custom_params=PLAIN).json()["text"] for s in FOLLOWING]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            mixed = list(pool.map(lambda s: server.generate(**s).json()["text"], FOLLOWING))
            assert mixed == plain


def test_a_grammar_is_kept_to_and_drafts_are_accepted_under_it(server):
    ours, _ = both(server, json_schema=json.dumps(SCHEMA), max_new_tokens=120)
    value = json.loads(ours["text"])
    assert set(value) == set(SCHEMA["required"])
    ours, _ = both(server, regex=r"(the library |of the ){2,12}", max_new_tokens=100)
    assert re.fullmatch(r"(the library |of the ){1,12}[a-z ]*", ours["text"])
    meta = ours["meta_info"]
    assert meta["spec_verify_ct"] < 0.8 * (meta["completion_tokens"] - 1)


@pytest.mark.parametrize("regex", [r"\d{4}", r"[a-z]+"])
def test_ignore_eos_beside_a_grammar_decodes_plainly(server, regex):
    ours, _ = both(server, regex=regex, ignore_eos=True, max_new_tokens=12)
    assert ours["meta_info"].get("spec_cap_length", 1.0) == 1.0


def test_a_grammar_that_does_not_compile_is_refused_and_the_server_goes_on(server):
    assert "text" not in server.generate(regex="(unclosed").json()
    both(server)


def test_a_custom_logit_processor_decodes_plainly(server):
    without = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    texts = []
    for extra in ({}, PLAIN):
        sampling = {"temperature": 0, "max_new_tokens": 30,
                    "custom_params": {"token_ids": [32, 101], **extra}}  # fmt: skip
        body = {"text": PROMPT, "sampling_params": sampling, **without}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
        texts.append(answer["text"])
        assert answer["meta_info"]["spec_cap_length"] == 1.0
    assert texts[0] == texts[1]
    assert not set(texts[0]) & {" ", "e"}


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}])
def test_sampling_is_restricted_as_asked(server, sampling):
    """Distributions are tested in tests/engine/test_sampling.py; here that drafts take part."""
    answer = server.generate(**sampling, temperature=0.7, max_new_tokens=60, ignore_eos=True).json()
    assert answer["meta_info"]["completion_tokens"] == 60
    assert answer["meta_info"]["spec_cap_length"] > 2


def test_several_answers_and_logprobs(client):
    asked = {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 3,
    }
    ours = client.completions.create(**asked, n=3)
    plain = client.completions.create(**asked, extra_body={"custom_params": PLAIN}).choices[0]
    assert len(ours.choices) == 3
    for choice in ours.choices:
        assert choice.text == plain.text
        assert choice.logprobs.token_logprobs == pytest.approx(
            plain.logprobs.token_logprobs, abs=2e-3
        )


def chat(client, template=None, **asked):
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    answers = [
        client.chat.completions.create(
            model="default", messages=messages, temperature=0,
            extra_body={**extra, "chat_template_kwargs": template or {}}, **asked
        ).choices[0].message
        for extra in ({}, {"custom_params": PLAIN})
    ]  # fmt: skip
    ours, plain = (a.model_dump() for a in answers)
    for call in [*(ours["tool_calls"] or ()), *(plain["tool_calls"] or ())]:
        call.pop("id")
    assert ours == plain
    return ours


def test_the_reasoning_parser(client):
    ours = chat(client, max_tokens=60)
    assert (ours.get("reasoning_content") or "") + (ours["content"] or "")


def test_tool_calls(client):
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    ours = chat(client, {"enable_thinking": False}, max_tokens=200, tools=[tool],
                tool_choice="required")  # fmt: skip
    (call, *_) = ours["tool_calls"]
    assert call["function"]["name"] == "add"
    json.loads(call["function"]["arguments"])  # held to the schema for strict tools only


def test_a_session_of_two_turns(server):
    texts = []
    for extra in ({}, PLAIN):
        session = requests.post(
            f"{server.url}/open_session", json={"capacity_of_str_len": 2000}, timeout=60
        ).json()
        said, rid = [], None
        for turn in (PROMPT, "\n\ndef write_lines(path):\n    "):
            body = {
                "text": turn,
                "session_params": {"id": session, "rid": rid},
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, "custom_params": extra},
            }
            answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
            said.append(answer["text"])
            rid = answer["meta_info"]["id"]
        requests.post(f"{server.url}/close_session", json={"session_id": session}, timeout=60)
        texts.append(said)
    assert texts[0] == texts[1]


def test_priorities(server):
    plain = server.generate(custom_params=PLAIN).json()["text"]

    def ask(priority: int) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 40}
        body = {"text": PROMPT, "priority": priority, "sampling_params": sampling}
        return requests.post(f"{server.url}/generate", json=body, timeout=120).json()["text"]

    with ThreadPoolExecutor(12) as pool:  # more than run at once
        assert list(pool.map(ask, [0, 3, 1, 2] * 4)) == [plain] * 16
