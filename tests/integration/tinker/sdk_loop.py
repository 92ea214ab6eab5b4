"""A loop with the public Tinker SDK: supervised, a loss of one's own, RL, samples, states. Run in .venv-tinker.

argv: the server's URL. Prints one JSON object.
"""

import json
import os
import sys

import numpy as np
import tinker
import torch
from tinker import types

os.environ.update(TINKER_TELEMETRY="0")
LIMIT_S = 400


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    made = {"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * (len(tokens) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=made)


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]


def negative(data: list[types.Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss whose gradient has both signs."""
    return sum((each * torch.linspace(-1.0, 1.0, len(each))).sum() for each in found), {"own": 1.0}


def main(url: str) -> dict[str, object]:
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result(timeout=LIMIT_S)
    adam = types.AdamParams(learning_rate=0.01)
    losses = []
    for _ in range(4):
        computed = training.forward_backward([datum([1, 2, 3, 4, 5]), datum([6, 7, 8])], "cross_entropy")
        stepped = training.optim_step(adam)
        losses.append(computed.result(timeout=LIMIT_S).metrics["loss:sum"])
        stepped.result(timeout=LIMIT_S)
    training.forward_backward_custom([datum([1, 2, 3])], negative).result(timeout=LIMIT_S)
    training.optim_step(adam).result(timeout=LIMIT_S)
    sampling = training.save_weights_and_get_sampling_client().result(timeout=LIMIT_S)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=1)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    samples = sampling.sample(prompt=prompt, num_samples=3, sampling_params=params).result(timeout=LIMIT_S).sequences
    for loss in ("importance_sampling", "ppo", "cispo"):
        rows = []
        for place, sample in enumerate(samples):
            tokens, pad = [1, 2, 3, *sample.tokens], [0.0, 0.0]
            advantages = [*pad, *[1.0 - place] * len(sample.tokens)]
            rows.append(datum(tokens, logprobs=[*pad, *sample.logprobs], advantages=advantages))
        training.forward_backward(rows, loss).result(timeout=LIMIT_S)
        training.optim_step(adam).result(timeout=LIMIT_S)
    refused = ""
    try:
        training.forward_backward([datum([1, 2])], "no_such_loss").result(timeout=LIMIT_S)
    except tinker.RequestFailedError as error:
        refused = str(error)
    path = training.save_state("end").result(timeout=LIMIT_S).path
    resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=LIMIT_S)
    ends = [
        logprobs(each.forward([datum([1, 2, 3, 4])], "cross_entropy").result(timeout=LIMIT_S))
        for each in (training, resumed)
    ]
    last = service.create_sampling_client(model_path=path).result(timeout=LIMIT_S)
    scored = last.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4])).result(timeout=LIMIT_S)
    listed = service.create_rest_client().list_checkpoints(training.model_id).result(timeout=LIMIT_S).checkpoints
    return {
        "losses": losses,
        "samples": [list(map(int, each.tokens)) for each in samples],
        "sampled_logprobs": [np.asarray(each.logprobs).tolist() for each in samples],
        "refused": refused,
        "ends": ends,
        "scored": scored,
        "listed": [each.tinker_path for each in listed],
        "path": path,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # the SDK's threads would go on
