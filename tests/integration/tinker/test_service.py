"""The API of `millrace tinker`: real processes, asked over HTTP with our own messages."""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest
from safetensors.numpy import load

from millrace.internal.v1 import tinker_pb2 as pb
from millrace_testing.tinker import Client, Server, datum, logprobs_of, loss_request, sample_request, vector

pytestmark = pytest.mark.timeout(600)

NUMBERS = itertools.count(100)
ADAM = {"adam_params": {"learning_rate": 0.01}}


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server)


def loss_of(output: bytes) -> float:
    return pb.ForwardBackwardOutput.FromString(output).metrics["loss:sum"]


def test_a_loop_learns_and_samples_what_it_learned(client: Client) -> None:
    model = client.model(0)
    data = [datum([1, 2, 3, 4]), datum([5, 6, 7])]
    losses, seq_id = [], 1
    for _ in range(4):
        # Pipelined, as clients do: the step is sent before the loss is there.
        sent = client.forward_backward(model, seq_id, data)
        stepped = client.send("optim_step", model, seq_id + 1, **ADAM)
        losses.append(loss_of(client.result(sent)))
        assert client.result(stepped)["metrics"]["grad_norm"] > 0
        seq_id += 2
    assert losses == sorted(losses, reverse=True)
    last = client.result(client.forward_backward(model, seq_id, data, forward_only=True))
    assert loss_of(last) == pytest.approx(-sum(each.sum() for each in logprobs_of(last)), rel=1e-6)
    sampler = client.sampler(model, seq_id + 1, 0)
    answer = client.sample(sampler, 0, [1, 2, 3, 4], prompt_logprobs=True)
    assert len(answer.sequences) == 2 and len(answer.sequences[0].tokens) == 4 * 5
    prompt = np.frombuffer(answer.prompt_logprobs, "<f4")
    # The sampler has the weights of the trainer: equal log-probs up to the order of sums.
    assert np.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], logprobs_of(last)[0], atol=1e-5)
    assert client.sample(sampler, 0, [1, 2, 3, 4], prompt_logprobs=True) == answer


def test_samples_follow_from_request_and_weights(client: Client) -> None:
    model = client.model(1)
    first = client.sampler(model, 1, 10)
    params = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
    once = client.sample(first, 0, [1, 2], sampling_params=params)
    base = client.json(
        "create_sampling_session",
        {"session_id": client.session, "sampling_session_seq_id": 11, "base_model": "tiny"},
    )["sampling_session_id"]
    # An adapter that never stepped adds 0: equal samples from the base.
    assert client.sample(base, 5, [1, 2], sampling_params=params).sequences[0] == once.sequences[0]
    assert once.sequences[0] != once.sequences[1], "each sample has a seed of its own"
    assert client.json(f"samplers/{base}")["base_model"] == "tiny"


def test_requests_are_executed_in_their_order_whatever_the_order_of_arrival(client: Client) -> None:
    def weights(number: int, order: list[int]) -> bytes:
        model = client.model(number)
        sends = {
            1: lambda: client.forward_backward(model, 1, [datum([1, 2, 3])]),
            2: lambda: client.forward_backward(model, 2, [datum([4, 5, 6])]),
            3: lambda: client.send("optim_step", model, 3, **ADAM),
            4: lambda: client.send("save_weights", model, 4, path="end"),
        }
        futures = {seq_id: sends[seq_id]() for seq_id in order}
        for seq_id in (2, 3):  # again, as after a lost answer: counted once
            assert sends[seq_id]() == futures[seq_id]
        for future in futures.values():
            client.result(future)
        return client.ask(f"training_runs/{model}/checkpoints/weights/end/archive")[2]

    assert weights(2, [1, 2, 3, 4]) == weights(3, [4, 2, 3, 1])


def test_a_gap_blocks_and_says_so(client: Client, server: Server) -> None:
    model = client.model(4)
    sent = client.send("optim_step", model, 2, **ADAM)
    status, _, data = client.ask("retrieve_future", {"request_id": sent})
    waits = json.loads(data)
    assert (status, waits["type"], waits["queue_state"]) == (200, "try_again", "active")
    assert waits["queue_state_reason"] == "request 1 of the model has not arrived, which comes before this one"
    client.forward_backward(model, 1, [datum([1, 2, 3])])
    assert client.result(sent)["metrics"]["grad_norm"] > 0


def test_another_request_under_a_seq_id_is_refused(client: Client) -> None:
    model = client.model(5)
    client.send("optim_step", model, 1, **ADAM)
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    status, message = client.refused("optim_step", body)
    assert status == 400 and "seq_id 1" in message and "another request" in message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"loss": "my_loss"}, "loss_fn: must be one of cross_entropy, importance_sampling"),
        ({"loss": "stable_reinforce"}, "its definition is not public"),
        ({"loss": "ppo"}, "must have logprobs"),
        ({"data": []}, "data: must have 1 to"),
        ({"data": [datum([1, 2, 999])]}, "target_tokens: must be whole numbers from 0 to 47"),
        ({"data": [datum([999, 2, 3])]}, "must be token ids from 0 to 47"),
        ({"data": [datum([1, 2, 3], weights=[1.0])]}, "data[0].weights: must have 2 numbers"),
        ({"data": [datum([1, 2, 3], weights=[1.0, float("nan")])]}, "must be finite"),
        ({"data": [datum([1] * 66)]}, "must have 1 to 64 tokens"),
        ({"loss_fn_config": {"beta": 1.0}}, "loss_fn_config.beta: is no key of cross_entropy"),
    ],
)
def test_what_is_wrong_with_a_request_is_its_result_and_changes_nothing(
    client: Client, request_: dict, message: str
) -> None:
    model = client.model(next(NUMBERS))
    client.forward_backward(model, 1, [datum([1, 2, 3])])
    wrong = {"data": [datum([1, 2, 3])], **request_}
    answer = client.result(client.forward_backward(model, 2, **wrong))
    assert answer["category"] == "user" and message in answer["error"]
    # The gradient of before is there, and the order goes on.
    assert client.result(client.send("optim_step", model, 3, **ADAM))["metrics"]["grad_norm"] > 0
    again = client.result(client.send("optim_step", model, 4, **ADAM))
    assert again["category"] == "user" and "there is no gradient" in again["error"]


def test_optimizers_and_models_that_are_not_here(client: Client) -> None:
    model = client.model(6)
    client.forward_backward(model, 1, [datum([1, 2, 3])])
    other = client.result(client.send("optim_step", model, 2, optimizer_params={"type": "dimuon"}))
    assert other["category"] == "user" and "AdamW" in other["error"]
    negative = client.result(client.send("optim_step", model, 3, adam_params={"learning_rate": -1.0}))
    assert negative["category"] == "user" and "learning_rate" in negative["error"]
    body = {"session_id": client.session, "model_seq_id": 7, "base_model": "other", "lora_config": {"rank": 4}}
    answer = client.result(client.json("create_model", body)["request_id"])
    assert answer["category"] == "user" and "this server has the base model tiny, not other" in answer["error"]
    huge = {**body, "model_seq_id": 8, "base_model": "tiny", "lora_config": {"rank": 100_000}}
    assert "lora_config.rank" in client.result(client.json("create_model", huge)["request_id"])["error"]


def test_saved_states_are_listed_loaded_and_downloaded(client: Client) -> None:
    model = client.model(9)
    client.forward_backward(model, 1, [datum([1, 2, 3])])
    client.send("optim_step", model, 2, **ADAM)
    path = client.result(client.send("save_weights", model, 3, path="one"))["path"]
    assert path == f"tinker://{model}/weights/one"
    taken = client.result(client.send("save_weights", model, 4, path="one"))
    assert taken["category"] == "user" and "exists" in taken["error"]
    assert "path" in client.result(client.send("save_weights", model, 5, path="one", overwrite=True))
    assert "letters, digits" in client.result(client.send("save_weights", model, 6, path="a/b"))["error"]
    named = client.result(client.send("save_weights_for_sampler", model, 7, path="s"))["path"]
    listed = client.json(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert {each["tinker_path"] for each in listed} == {path, named}
    info = client.json("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["is_lora"]) == ("tiny", 4, True)
    with tarfile.open(
        fileobj=io.BytesIO(client.ask(f"training_runs/{model}/checkpoints/weights/one/archive")[2])
    ) as tar:
        weights = load(tar.extractfile("adapter_model.safetensors").read())
        config = json.loads(tar.extractfile("adapter_config.json").read())
    assert config["r"] == 4 and "base_model.model.lm_head.lora_A.weight" in weights
    # A new model of the state goes on as the old one does.
    sent = client.json(
        "load_weights", {"session_id": client.session, "model_seq_id": 10, "path": path, "optimizer": True}
    )["request_id"]
    assert "error" not in client.result(sent)
    other = sent.split("/")[1]
    assert client.json("get_info", {"model_id": other})["lora_rank"] == 4
    ends = []
    for each, seq_id in ((model, 8), (other, 1)):
        client.forward_backward(each, seq_id, [datum([4, 5, 6])])
        client.send("optim_step", each, seq_id + 1, **ADAM)
        client.result(client.send("save_weights", each, seq_id + 2, path="end"))
        ends.append(client.ask(f"training_runs/{each}/checkpoints/weights/end/archive")[2])
    assert ends[0] == ends[1]


def test_ids_of_nothing_are_404(client: Client) -> None:
    model = client.model(11)
    foreign = f"s-{'0' * 32}:train:0"
    for path, body in (
        ("get_info", {"model_id": foreign}),
        ("optim_step", {"model_id": foreign, "seq_id": 1, **ADAM}),
        ("forward_backward", loss_request(foreign, 1, [datum([1, 2])])),
        ("retrieve_future", {"request_id": f"model/{model}/77"}),
        ("retrieve_future", {"request_id": "../../x"}),
        ("asample", sample_request(f"s-{'0' * 32}:sample:0", 0, [1])),
        ("weights_info", {"tinker_path": f"tinker://{foreign}/weights/x"}),
        ("session_heartbeat", {"session_id": f"s-{'0' * 32}"}),
        ("training_runs/x/checkpoints", None),
        ("nothing", {}),
    ):
        assert client.refused(path, body)[0] == 404, path


def test_malformed_and_too_large_bodies(client: Client) -> None:
    model = client.model(12)
    assert client.refused("optim_step", {"model_id": model, "seq_id": "x"})[0] == 400
    assert client.refused("forward_backward", b"\xff\xff\xff")[0] == 400
    assert client.refused("forward_backward", {"model_id": model})[0] == 400
    large = loss_request(model, 1, [pb.Datum(loss_fn_inputs={"weights": vector([0.0] * (9 << 20))})])
    status, message = client.refused("forward_backward", large)
    assert status == 413 and message.startswith("the body has more than 33554432 bytes; send less at once")


def test_a_finished_session_takes_nothing_more(server: Server) -> None:
    client = Client(server)
    model = client.model(0)
    client.json(f"sessions/{client.session}/finish", {})
    assert client.refused("session_heartbeat", {"session_id": client.session})[0] == 410
    status, message = client.refused("optim_step", {"model_id": model, "seq_id": 1, **ADAM})
    assert status == 410 and "has ended" in message
    assert client.json(f"sessions/{client.session}")["training_run_ids"] == [model]


def test_samples_that_are_not_served_are_refused(client: Client) -> None:
    sampler = client.sampler(client.model(13), 1, 20)
    for seq_id, (body, message) in enumerate(
        [
            ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs"),
            ({"record_stability_info": True}, "stable_reinforce"),
            ({"prompt": {"chunks": []}}, "must have 1 to"),
            ({"prompt": {"chunks": [{"type": "image"}]}}, "tokens of text"),
            ({"sampling_params": {"max_tokens": 2, "temperature": -1}}, "temperature"),
        ]
    ):
        sent = client.json("asample", {**sample_request(sampler, seq_id, [1, 2]), **body})
        answer = client.result(sent["request_id"])
        assert answer["category"] == "user" and message in answer["error"]
