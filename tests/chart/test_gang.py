"""Gangs over several nodes: what torchrun is told, checked by torchrun's own parser, and who is rank 0."""

import json
import re
import subprocess
import sys

import pytest

from millrace.inference.launcher import Node
from millrace.local.directory import free_ports

CASES = {"multi-node": (4, 8), "external-stores": (2, 2)}


def _nodes(rendered) -> list[list[str]]:
    """Return the arguments of torchrun at the leader and at the first worker, with the names of their hosts."""
    found = []
    for component in ("trainer", "trainer-worker"):
        container = rendered.pod(component).spec["containers"][0]
        assert container["command"] == ["tini", "--", "torchrun"]
        owner = rendered.pod(component).owner.partition("/")[2]
        names = {"POD_NAME": f"{owner}-0", "POD_INDEX": "0"}
        found.append(
            [re.sub(r"\$\((\w+)\)", lambda use, names=names: names[use[1]], word) for word in container["args"]]
        )
    return found


@pytest.mark.parametrize("case", CASES)
def test_torchrun_takes_the_arguments(render, case):
    from torch.distributed.run import get_args_parser

    nodes, processes = CASES[case]
    for arguments in _nodes(render(case)):
        parsed = get_args_parser().parse_args(arguments)
        assert (parsed.nnodes, parsed.nproc_per_node) == (str(nodes), str(processes))
        assert parsed.rdzv_backend == "c10d" and parsed.no_python
        assert parsed.training_script == "millrace-trainer"


@pytest.mark.parametrize("case", CASES)
def test_the_leaders_name_comes_first(render, case):
    """torchrun gives ranks in the order of the hosts' names, and only rank 0 has a health server to probe."""
    hosts = [next(word for word in words if word.startswith("--local-addr=")) for words in _nodes(render(case))]
    assert hosts == sorted(hosts) and hosts[0] != hosts[1]


@pytest.mark.parametrize("case", CASES)
def test_one_node_hosts_the_rendezvous(render, case):
    leader, worker = _nodes(render(case))
    assert any(word.startswith("--rdzv-conf=is_host=true,") for word in leader)
    assert any(word.startswith("--rdzv-conf=is_host=false,") for word in worker)
    endpoint = next(word.partition("=")[2] for word in worker if word.startswith("--rdzv-endpoint="))
    host = next(word.partition("=")[2] for word in leader if word.startswith("--local-addr="))
    assert endpoint == f"{host}:29400"


def test_the_leader_is_where_its_name_says(render):
    made = render("external-stores")
    leader, _ = _nodes(made)
    host = next(word.partition("=")[2] for word in leader if word.startswith("--local-addr="))
    stateful = made.one("StatefulSet", "rl-trainer")
    assert host == f"{stateful['metadata']['name']}-0.{stateful['spec']['serviceName']}.rl.svc"
    jobset = render("multi-node").of_kind("JobSet")[0]
    host = next(word.partition("=")[2] for word in _nodes(render("multi-node"))[0] if word.startswith("--local-addr="))
    name = jobset["metadata"]["name"]
    assert host == f"{name}-leader-0-0.{jobset['spec']['network']['subdomain']}.rl.svc"


def test_a_jobset_starts_and_ends_as_a_whole(render):
    spec = render("multi-node").of_kind("JobSet")[0]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    sizes = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert (sizes["leader"]["completions"], sizes["worker"]["completions"]) == (1, 3)
    for job in sizes.values():
        assert job["backoffLimit"] == 0 and job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert all("--max-restarts=0" in words for words in _nodes(render("multi-node")))


def test_another_pod_is_another_jobset(render):
    """Its pods cannot be changed in place: an upgrade would be refused."""

    def name(*sets):
        return render("multi-node", *sets).of_kind("JobSet")[0]["metadata"]["name"]

    assert name() != name("trainer.image.tag=other-cuda")
    assert name() != name("trainer.nodes=8")
    assert name() == name("inference.replicas=3"), "an upgrade of something else leaves the gang alone"


def test_an_engine_over_several_nodes_is_one_group(render):
    spec = render("multi-node").of_kind("LeaderWorkerSet")[0]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    (server,), (node,) = (group[name]["spec"]["containers"] for name in ("leaderTemplate", "workerTemplate"))
    assert "command" not in node and "args" not in node, "the launcher, which knows how policies reach its node"
    assert node["env"] == server["env"] and node["image"] == server["image"]
    environ = {one["name"]: one.get("value") for one in node["env"]}
    flags = json.loads(environ["MILLRACE_VLLM_FLAGS"])
    wanted = {"node_rank": "$(LWS_WORKER_INDEX)", "master_addr": "$(LWS_LEADER_ADDRESS)", "tensor_parallel_size": 8}
    assert wanted.items() <= flags.items()
    assert environ["MILLRACE_STORE_URL"] and environ["MILLRACE_MODEL"], "each node pulls policies from the store"
    for rank in "01":  # as LWS and Kubernetes fill them in
        text = environ["MILLRACE_VLLM_FLAGS"].replace("$(LWS_WORKER_INDEX)", rank)
        node_of = Node.of(json.loads(text.replace("$(LWS_LEADER_ADDRESS)", "inference-0.inference.rl")))
        assert node_of == Node(rank=int(rank), count=2, master=("inference-0.inference.rl", 29500))
    service = render("multi-node").one("Service", "inference-http")["spec"]["selector"]
    leader, worker = (group[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate"))
    assert service.items() <= leader.items() and not service.items() <= worker.items()


def test_two_nodes_meet_and_the_leader_has_rank_0(render, tmp_path):
    """The rendered arguments under the real torchrun, with 127.0.0.1 and localhost as the two hosts."""
    (port,) = free_ports(1)
    children = []
    script = tmp_path / "rank.sh"
    script.write_text('#!/bin/sh\necho "$RANK $WORLD_SIZE $GROUP_RANK" > "$1/$2-$LOCAL_RANK"\n')
    script.chmod(0o755)
    for role, host, words in zip(
        ("leader", "worker"), ("127.0.0.1", "localhost"), _nodes(render("external-stores")), strict=True
    ):
        arguments = [
            f"--rdzv-endpoint=127.0.0.1:{port}"
            if word.startswith("--rdzv-endpoint=")
            else f"--local-addr={host}"
            if word.startswith("--local-addr=")
            else word
            for word in words
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *arguments[:-1], str(script), str(tmp_path), role]
        children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for child in children:
            _, complaint = child.communicate(timeout=90)
            assert child.returncode == 0, complaint
    finally:
        for child in children:
            child.kill()
            child.wait()
    ranks = {path.name: path.read_text().split() for path in tmp_path.glob("*er-*")}
    assert ranks == {
        "leader-0": ["0", "4", "0"],
        "leader-1": ["1", "4", "0"],
        "worker-0": ["2", "4", "1"],
        "worker-1": ["3", "4", "1"],
    }
