"""Log-probs, experts and ends of responses, as vLLM returns them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.errors import EngineError
from flash.foreign import vllm
from flash.rollout.engine import ResponseRequest
from flash.rollout.vllm.engine import SamplingParameters, read_logprobs, read_routes, stop_text_tokens
from flash.rollout.vllm.start import TIES
from flash.sampling import Grammar, Kept, Sampling

VOCABULARY = 100
HOW = Sampling(top_k=3)


def asked(sampling: Sampling) -> dict[str, Any]:
    """Return a sampling as vLLM takes it."""
    return msgspec.structs.asdict(sampling) | {"stop": [], "stop_token_ids": [], "logit_bias": {}}


# vllm is imported by the tests that need it, because every worker of the test session imports this file.


def piece(drawn: int, likeliest: Sequence[int]) -> Any:
    """Return the log-probs of one position: the drawn token, then the most likely ones, which include it."""
    from vllm.logprobs import FlatLogprobs

    flat, told = FlatLogprobs(), HOW.top_k + TIES
    ids = [*likeliest, *range(90, 90 + told - len(likeliest))]
    logprobs = [-1.0 - place if place < len(likeliest) else float("-inf") for place in range(told)]
    flat.append_fast(
        [drawn, *ids], [logprobs[ids.index(drawn)], *logprobs], chain(range(told + 1)), [None] * (told + 1)
    )
    return flat


@pytest.mark.slow
def test_law_4_pieces_that_vllm_has_put_together_say_what_they_said_alone() -> None:
    """vLLM joins pieces if a token comes before the caller has read the one ahead of it."""
    drawn, likeliest = [7, 4, 9, 9], [[5, 6, 7], [4], [9, 8], [1, 2, 9]]
    pieces = [piece(*one) for one in zip(drawn, likeliest, strict=True)]
    whole = piece(drawn[0], likeliest[0])
    for later in pieces[1:]:
        whole.extend(later)
    expected = [-3.0, -1.0, -1.0, -3.0], Kept.of([5, 6, 8, 1, 2], [2, 0, 1, 2])
    assert read_logprobs(whole, drawn, HOW, VOCABULARY) == expected
    alone = [read_logprobs(flat, [token], HOW, VOCABULARY) for flat, token in zip(pieces, drawn, strict=True)]
    assert [logprobs[0] for logprobs, _ in alone] == expected[0]
    assert [kept for _, kept in alone] == [expected[1].part(at, at + 1) for at in range(4)]


def test_experts_of_other_tokens_than_were_computed_are_an_error() -> None:
    chosen = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    assert (read_routes(SimpleNamespace(routed_experts=chosen), 4).numbers() == chosen).all()
    for told_of in (None, chosen[:3]):
        with pytest.raises(EngineError, match="should return the experts of 4 tokens"):
            read_routes(SimpleNamespace(routed_experts=told_of), 4)


@pytest.mark.parametrize("drawn", [0, TIES + 2])
def test_more_ties_than_were_asked_for_are_an_error(drawn: int) -> None:
    ids = range(HOW.top_k + TIES)
    whole = piece(1, [1])
    whole.extend(piece(drawn, ids))
    assert read_logprobs(whole, [1, drawn], HOW, len(ids))[1] is not None
    with pytest.raises(EngineError, match="exactly as likely"):
        read_logprobs(whole, [1, drawn], HOW, VOCABULARY)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_text_that_ends_a_response_is_found_from_where_the_response_began(done: int) -> None:
    """Also from the middle of a letter."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists

    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
    said: list[int] = tokenizer.encode("xñbc")  # of five tokens
    moved = ResponseRequest([*tokenizer.encode("…"), *said[:done]], 9, 0, stop=("ñb",), generated=done)
    processor: Any = OutputProcessor(tokenizer, log_stats=False)
    queue: Any = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    parameters = vllm.sampling_parameters(asked(Sampling(stop=moved.stop)) | {"stop": ["ñb"]}, 9)
    request = EngineCoreRequest("r", moved.prompt, None, parameters, None, 0, None, None, None, external_req_id="r")
    processor.add_request(request, None, queue=queue)
    vllm.search_stop_text_in_prompt(
        SimpleNamespace(output_processor=processor), queue, moved.prompt, stop_text_tokens(moved)
    )
    found = list[int]()
    for token in said[done:]:
        lists = LogprobsLists(np.array([[token]]), np.zeros((1, 1)), np.array([1]))
        processor.process_outputs([EngineCoreOutput("r", [token], new_logprobs=lists)])
        if (output := queue.get_nowait()) is not None:
            found += output.outputs[0].token_ids
    assert found == said[done:4]
    assert (output, processor.request_states) == (None, {})


@pytest.mark.parametrize("interval", [1, 3])
def test_of_the_likeliest_tokens_vllm_holds_those_in_no_piece_alone_and_no_texts(interval: int) -> None:
    """The most likely tokens of all running requests would not fit a node's memory, and their texts take too long."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists

    processor: Any = OutputProcessor(None, log_stats=False, stream_interval=interval)
    parameters = vllm.sampling_parameters(asked(HOW), 99, likeliest=2)
    queue: Any = RequestOutputCollector(parameters.output_kind, "r")
    request = EngineCoreRequest("r", [1], None, parameters, None, 0.0, None, None, None, external_req_id="r")
    processor.add_request(request, None, queue=queue)
    state, read = processor.request_states["r"], list[int]()
    state.logprobs_processor.tokenizer = object()  # of which no text can be had
    forget = vllm.trim_logprobs(SimpleNamespace(output_processor=processor), queue)
    for token in range(20):
        lists = LogprobsLists(np.array([[token, token, 50]]), np.zeros((1, 3)), np.array([1]))
        processor.process_outputs([EngineCoreOutput("r", [token], new_logprobs=lists)])
        if token % 4 and (output := queue.get_nowait()) is not None:
            (piece,) = output.outputs
            assert [piece.logprobs.token_ids[at] for at in piece.logprobs.start_indices] == piece.token_ids
            read += piece.token_ids
            forget()
            assert len(state.logprobs_processor.logprobs) <= interval
    assert read == list(range(len(read)))
    assert len(read) > 20 - interval - 1


@pytest.mark.slow
def test_vllm_does_not_check_a_grammar_again_for_each_request() -> None:
    """The check may take seconds and would block the event loop. Another process has made it."""
    request = ResponseRequest([1], 5, key=0, sampling=Sampling(), seed=1, grammar=Grammar("not even a tag"))
    parameters = SamplingParameters().of(request, VOCABULARY)
    parameters._validate_structured_outputs(None, None, None)
    assert parameters.structured_outputs._backend == "xgrammar"
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(parameters))
    assert sent["structured_outputs"]["structural_tag"] == "not even a tag"
