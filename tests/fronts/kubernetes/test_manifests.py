"""Every manifest keeps to its operator's own schema, says why, and makes one job of its pods."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InvalidArgumentError
from roundelay.fronts.kubernetes import kubernetes
from roundelay.fronts.kubernetes._job import IMAGE, KubernetesJob
from roundelay.fronts.kubernetes._pod import escaped
from roundelay.fronts.kubernetes._yaml import Because, plain, to_yaml
from roundelay.launch.pods import ranks_of_pod, torchrun_options

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CRDS = Path(__file__).parent / "crds"
ARGS = ["--lr", "-1e-3", "two words", "no", "$(HOSTNAME)", "", "é\n'\"", "#", "- x: y"]


def jobs(kind: str) -> Iterator[KubernetesJob]:
    """Yield jobs of every kind of wish."""
    grid = itertools.product(
        (1, 2, 3), (1, 4), (False, True), (False, True) if kind == "pytorchjob" else (False,),
        ([], ["A=no", "B_2=$(A) x"]), (None, "job-secret"), (False, True),
    )  # fmt: skip
    for nodes, per_node, gpu, elastic, env, secret, module in grid:
        yield KubernetesJob(
            script="pkg.train" if module else "app/train.py", module=module, args=ARGS,
            image="ghcr.io/me/train:1.0", nodes=nodes, ranks=nodes * per_node, gpu=gpu,
            elastic=elastic, env=env, secret=secret, namespace="team" if gpu else None,
        )  # fmt: skip


def strict(node: Any) -> Any:
    """Return a schema that refuses what it does not name."""
    if isinstance(node, list):
        return [strict(value) for value in node]
    if not isinstance(node, dict):
        return node
    made = {key: strict(value) for key, value in node.items()}
    names = isinstance(node.get("properties"), dict) and "type" in node
    if names and not node.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module", params=kubernetes.names())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def validator(kind: str) -> Any:
    schema = strict(json.loads((CRDS / f"{kind}.json").read_text(encoding="utf-8")))
    return jsonschema.Draft202012Validator(schema)


def errors(validator: Any, manifest: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def test_the_schema_of_the_operator_has_nothing_against_it(kind: str, validator: Any) -> None:
    for job in jobs(kind):
        manifest = kubernetes.load(kind)(job)
        assert errors(validator, plain(manifest)) == []
        for explained in (False, True):
            read = yaml.load(to_yaml(manifest, explained=explained), LOADER)
            assert read == plain(manifest)
            assert read["kind"].lower() == kind


def test_every_line_has_its_reason(kind: str) -> None:
    for job in jobs(kind):
        lines = to_yaml(kubernetes.load(kind)(job), explained=True).splitlines()
        assert [line for line in lines if not re.search(r" {2}# \w", line)] == []


#: Below these any name may stand.
FREE = ("metadata", "limits", "pytorchReplicaSpecs", "mpiReplicaSpecs")


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from places(value, (*path, number))


def test_a_key_with_a_typing_error_would_be_found(kind: str, validator: Any) -> None:
    job = KubernetesJob(script="t.py", image="i", nodes=2, ranks=8, gpu=True, secret="s",
                        env=["A=1"], elastic=kind == "pytorchjob")  # fmt: skip
    manifest = plain(kubernetes.load(kind)(job))
    found = 0
    for *path, key in places(manifest):
        if path and path[-1] in FREE:
            continue
        wrong = inner = copy.deepcopy(manifest)
        for step in path:
            inner = inner[step]
        inner[f"{key}s"] = inner.pop(key)
        assert errors(validator, wrong) != [], (*path, key)
        found += 1
    assert found > 25


def rules(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "x-kubernetes-validations" and isinstance(value, list):
                yield from (each["rule"] for each in value)
            else:
                yield from rules(value)
    elif isinstance(node, list):
        for value in node:
            yield from rules(value)


def test_rules_that_no_schema_checks_are_kept_by_hand(kind: str) -> None:
    """Those of CEL: what they say of fields that we write when a job is made, is checked here."""
    found = set(rules(json.loads((CRDS / f"{kind}.json").read_text(encoding="utf-8"))))
    of_changes = {"self == oldSelf"}
    of_what_we_do_not_write = {rule for rule in found if "://" in rule or "multikueue" in rule}
    name = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
    checked = {f"self.metadata.name.matches('{name}')", "size(self.metadata.name) <= 63"}
    assert found - of_changes - of_what_we_do_not_write <= checked
    for job in jobs(kind):
        made = plain(kubernetes.load(kind)(job))["metadata"]["name"]
        assert re.match(name, made)
        assert len(made) <= 63


def pods_of(manifest: Any) -> Iterator[dict[str, str]]:
    """Yield the variables of every pod, as the operator sets them."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        trainer = spec["trainer"]
        count, per_node = trainer["numNodes"], str(trainer["numProcPerNode"])
    else:
        count = sum(each["replicas"] for each in spec["pytorchReplicaSpecs"].values())
        per_node = spec["nprocPerNode"]
    common = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": per_node}
    if policy := spec.get("elasticPolicy"):
        span = f"{policy['minReplicas']}:{policy['maxReplicas']}"
        meets = {"PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ENDPOINT": "w-0:23456",
                 "PET_NNODES": span, "PET_MAX_RESTARTS": str(policy["maxRestarts"])}  # fmt: skip
        yield from ({**common, **meets} for _ in range(count))
        return
    for index in range(count):
        place = {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "1"}
        if manifest["kind"] == "PyTorchJob":
            place |= {"RANK": str(index), "WORLD_SIZE": str(count * int(per_node))}
        yield {**common, **place}


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_its_pods_are_the_hosts_of_one_job(kind: str) -> None:
    for job in jobs(kind):
        pods = list(pods_of(plain(kubernetes.load(kind)(job))))
        assert sum(map(ranks_of_pod, pods)) == job.ranks
        handed = [torchrun_options({}, pod) for pod in pods]
        if job.nodes == 1:
            assert handed == [{"max_restarts": "3"} if job.elastic else {}]
        elif job.elastic:
            assert {each["nnodes"] for each in handed} == {f"1:{job.nodes}"}
        else:
            assert [each["node_rank"] for each in handed] == [*map(str, range(job.nodes))]
            assert {each["nnodes"] for each in handed} == {str(job.nodes)}


def test_an_mpijob_has_as_many_slots_as_ranks() -> None:
    for job in jobs("mpijob"):
        spec = plain(kubernetes.load("mpijob")(job))["spec"]
        launcher, workers = spec["mpiReplicaSpecs"].values()
        assert spec["slotsPerWorker"] * workers["replicas"] == job.ranks
        args = launcher["template"]["spec"]["containers"][0]["args"]
        assert args[:3] == ["--mpi", "-n", str(job.ranks)]
        assert ("-x A -x B_2" in args) == bool(job.env)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return what Kubernetes makes of text in commands and variables."""
    made, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        made += before
        closed = re.match(r"\(([^)]*)\)", rest)
        if rest.startswith("$"):
            made, rest = made + "$", rest[1:]
        elif closed:
            known = variables.get(closed[1], f"$({closed[1]})")
            made, rest = made + known, rest[closed.end() :]
        else:
            made, rest = made + "$" + rest[:1], rest[1:]
    return made + rest


@given(st.text("$()aA x"))
def test_nothing_in_words_is_taken_for_a_variable(text: str) -> None:
    assert expanded(escaped(text), {"a": "x", "A": "y", "": "z"}) == text


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORDS = st.sampled_from(
    ["no", "NO", "on", "y", "~", "null", "1e3", "0x1f", "1_000", "1:20", ".5", ".inf", "=", "<<",
     "2026-01-01", "-", "- a", "a: b", "a #b", "&a", "*a", "!a", "|", ">", "%a", "@a", "`a", "a:",
     " a", "a ", "", "{}", "[]", "'a'", '"a"', "\t", "\x85", "\u2028", "\ufeff", "\x7f", "😀"]
)  # fmt: skip
SCALAR = st.one_of(TEXT, WORDS, st.integers(-(10**9), 10**9), st.booleans(), st.none())
VALUE = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT | WORDS, inner, max_size=4)
        | inner.map(lambda value: Because(value, "since"))
    ),
    max_leaves=12,
)


@given(st.dictionaries(TEXT | WORDS, VALUE, max_size=4), st.booleans())
def test_any_value_is_read_back_as_it_was(value: dict[str, Any], explained: bool) -> None:  # noqa: FBT001
    text = to_yaml(value, explained=explained)
    assert (yaml.load(text, LOADER) or {}) == plain(value)


IMAGES = {
    "train": True, "me/train": True, "ghcr.io/me/train:1.0": True, "localhost:5000/a_b/c-d": True,
    "a@sha256:" + "0" * 64: True, "r.io/a:t@sha256:" + "0" * 64: True, "[::1]:80/a": True,
    "": False, ":latest": False, "/a": False, "a/": False, "a//b": False, "Train": False,
    "a:": False, "a b": False, "a@": False, "a:t:u": False, "me/Train:1": False, "a\n": False,
    "-a": False, "a@sha256:0": False, "http://a/b": False, "a:" + "t" * 129: False,
}  # fmt: skip


@pytest.mark.parametrize("image", IMAGES)
def test_names_of_images(image: str) -> None:
    assert bool(IMAGE.fullmatch(image)) == IMAGES[image]


def test_a_name_may_be_as_long_as_its_pods_names_allow(kind: str) -> None:
    def made(length: int) -> Any:
        job = KubernetesJob(script="t.py", image="i", nodes=12, ranks=12, name="a" * length)
        return kubernetes.load(kind)(job)

    longest = 63 - len("-node-0-11" if kind == "trainjob" else "-worker-11")
    made(longest)
    with pytest.raises(InvalidArgumentError, match="with 1 fewer"):
        made(longest + 1)


def test_names_are_what_kubernetes_takes() -> None:
    named: dict[str, Any] = {"namespace": "1team", "secret": "1.my-secret", "runtime": "my.rt"}
    job = KubernetesJob(**GOOD, **named)
    assert (job.namespace, job.secret, job.runtime) == ("1team", "1.my-secret", "my.rt")
    KubernetesJob(**{**GOOD, "script": "pkg.train", "module": True})


GOOD: dict[str, Any] = {"script": "t.py", "image": "i", "nodes": 2, "ranks": 8}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image": ""}, "--image '' is no name of an image"),
        ({"image": ":latest"}, "is no name of an image"),
        ({"image": "a" * 501}, "is no name of an image"),
        ({"nodes": 0}, "--nodes 0: a job has 1 to 1024"),
        ({"ranks": -8}, "--ranks -8: a job has"),
        ({"ranks": 2000}, "--ranks 2000: a job has"),
        ({"nodes": 3}, "can't be divided evenly between 3 nodes"),
        ({"nodes": 3}, "Write --ranks 9"),
        ({"nodes": 16}, "Write --ranks 16"),
        ({"grace": 5}, "35 s or more"),
        ({"name": "Train"}, "--name 'Train' is no name"),
        ({"name": "9a"}, "begins with a letter"),
        ({"name": "a-"}, "does not end"),
        ({"name": "a" * 64}, "up to 63"),
        ({"script": "7.py"}, "--name '7' is no name"),
        ({"script": "--lr"}, "is no script"),
        ({"script": "", "name": "a"}, "is no script"),
        ({"namespace": "a_b"}, "--namespace 'a_b'"),
        ({"namespace": "a.b"}, "neither begins nor ends with a hyphen"),
        ({"secret": "a..b"}, "hyphens and dots, neither begins nor ends"),
        ({"secret": "a" * 254}, "up to 253"),
        ({"runtime": "-a"}, "--runtime '-a'"),
        ({"module": True, "script": "pkg/train.py"}, "write -m pkg.train, as for Python"),
        ({"module": True, "script": "train.py"}, "write -m train, as for Python"),
        ({"secret": "a.b c"}, "--secret"),
        ({"runtime": ""}, "--runtime ''"),
        ({"env": ["A"]}, "Write NAME=VALUE"),
        ({"env": ["=1"]}, "Write NAME=VALUE"),
        ({"env": ["A B=1"]}, "Write NAME=VALUE"),
        ({"env": ["PET_NNODES=3"]}, "--env PET_NNODES: operators"),
        ({"env": ["RANK=0"]}, "--env RANK: operators"),
        ({"env": ["A=1", "A=2"]}, "--env A is given twice"),
        ({"env": ["ROUNDELAY_SECRET=x"], "secret": "s"}, "--secret s gives it"),
        ({"args": ["\udcff"]}, "is no text"),
        ({"args": ["x"] * 130}, "more than the 128"),
        ({"secret": ""}, "--secret '' is no name in Kubernetes"),
        ({"namespace": ""}, "Is a variable of the shell empty?"),
        ({"name": ""}, "Is a variable of the shell empty?"),
        ({"image": None}, "image of a KubernetesJob is text, not None"),
        ({"script": "3d.py"}, "It is the script's: say another by --name."),
        ({"secret": 3}, "secret of a KubernetesJob is text, not 3"),
        ({"nodes": "2"}, "nodes of a KubernetesJob is a whole number, not '2'"),
        ({"ranks": True}, "ranks of a KubernetesJob is a whole number, not True"),
        ({"grace": 60.5}, "grace of a KubernetesJob is a whole number, not 60.5"),
        ({"grace": 2**31}, "Kubernetes takes up to 2147483647"),
        ({"args": "--lr 1"}, "args of a KubernetesJob is a list of text, not '--lr 1'"),
        ({"env": [("A", "1")]}, "env of a KubernetesJob is a list of text, but has ('A', '1')"),
    ],
)
def test_what_can_not_be_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        KubernetesJob(**{**GOOD, **changes})
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["trainjob", "mpijob"])
def test_a_fixed_number_of_pods_is_not_called_elastic(kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match="kube pytorchjob --elastic"):
        kubernetes.load(kind)(KubernetesJob(**GOOD, elastic=True))


@pytest.mark.parametrize("kind", ["pytorchjob", "mpijob"])
def test_a_runtime_is_for_trainjobs(kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match="kube trainjob --runtime mine"):
        kubernetes.load(kind)(KubernetesJob(**GOOD, runtime="mine"))
    made = plain(kubernetes.load("trainjob")(KubernetesJob(**GOOD, runtime="mine")))
    assert made["spec"]["runtimeRef"] == {"name": "mine"}


def test_a_script_gives_the_job_its_name() -> None:
    for script, name in {
        "train.py": "train",
        "a/b/Train_GPT.py": "train-gpt",
        "p.q": "p-q",
    }.items():
        assert KubernetesJob(**{**GOOD, "script": script}).label == name
