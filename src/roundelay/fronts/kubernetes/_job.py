"""What a job on Kubernetes needs to be told, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundelay.arguments import index_of, shown
from roundelay.errors import InvalidArgumentError, rank_count

__all__ = ["GPU", "KubernetesJob"]

GPU = "nvidia.com/gpu"
#: What names are, by the option: of a job, whose pods are hosts of DNS (RFC 1035), of a namespace
#: (a label of RFC 1123), and of objects (a subdomain of RFC 1123).
LABEL, MOST_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?"), 63
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
SUBDOMAIN, MOST_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*"), 253
NAMES = {
    "--name": (LABEL, MOST_LABEL, "letters, digits and hyphens, begins with a letter"),
    "--namespace": (re.compile(_LABEL), MOST_LABEL, "letters, digits and hyphens, neither begins"),
    "--secret": (SUBDOMAIN, MOST_SUBDOMAIN, "letters, digits, hyphens and dots, neither begins"),
    "--runtime": (SUBDOMAIN, MOST_SUBDOMAIN, "letters, digits, hyphens and dots, neither begins"),
}
MODULE = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*")
MOST_WORDS = 128  # arguments, and variables, of a TrainJob
MOST_IMAGE = 500
MOST_RANKS = 1024
MOST_GRACE_S = 2**31 - 1
LEAST_GRACE_S = 35  # torchrun gives ranks 30 s to end

_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?"
    rf"(?:@[A-Za-z][A-Za-z0-9.+_-]*:[0-9a-fA-F]{{32,}})?",
    re.ASCII,
)
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What operators and launchers set themselves, to say which rank is which.
THEIRS = re.compile(
    r"(PET|OMPI|PMIX|PMI|PRTE|HYDRA|I_MPI|TORCHELASTIC)_.*|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A script on so many ranks, in so many pods, from an image; raises what can't be.

    >>> KubernetesJob(script="train.py", image="me/train:1", nodes=2, ranks=8).per_node
    4
    """

    script: str
    image: str
    nodes: int
    ranks: int
    args: Sequence[str] = ()
    name: str | None = None  # the script's, if it is left out
    namespace: str | None = None
    module: bool = False
    gpu: bool = False
    elastic: bool = False
    env: Sequence[str] = ()  # NAME=VALUE
    secret: str | None = None  # of Kubernetes, with the job's own under the key `secret`
    runtime: str | None = None  # of a TrainJob; torch-distributed, if it is left out
    grace: int = 60

    def __post_init__(self) -> None:
        for check in (_check_kinds, _check_counts, _check_names, _check_words, _check_variables):
            check(self)

    @property
    def label(self) -> str:
        """The name of the job: the one given, or the script's."""
        stem = self.script.rpartition("/")[2].removesuffix(".py")
        return re.sub(r"[._]+", "-", stem).lower().strip("-") if self.name is None else self.name

    @property
    def per_node(self) -> int:
        """The ranks in each pod."""
        return self.ranks // self.nodes

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables, by name."""
        return dict(word.partition("=")[::2] for word in self.env)

    @property
    def target(self) -> list[str]:
        """The words behind `roundelay run`: the script and what is handed to it."""
        return [*(["-m"] if self.module else []), self.script, *self.args]


def _check_kinds(job: KubernetesJob) -> None:
    for name in ("script", "image", "name", "namespace", "secret", "runtime"):
        text = getattr(job, name)
        if not isinstance(text, str) and (text is not None or name in ("script", "image")):
            raise InvalidArgumentError(f"{name} of a KubernetesJob is text, not {shown(text)}.")
    for name in ("args", "env"):
        words = getattr(job, name)
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise InvalidArgumentError(
                f"{name} of a KubernetesJob is a list of text, not {shown(words)}."
            )
        for word in words:
            if not isinstance(word, str):
                raise InvalidArgumentError(
                    f"{name} of a KubernetesJob is a list of text, but has {shown(word)}."
                )
    for name in ("nodes", "ranks", "grace"):
        if index_of(getattr(job, name)) is None:
            given = shown(getattr(job, name))
            raise InvalidArgumentError(f"{name} of a KubernetesJob is a whole number, not {given}.")


def _check_counts(job: KubernetesJob) -> None:
    for name, count in (("--nodes", job.nodes), ("--ranks", job.ranks)):
        if not 1 <= count <= MOST_RANKS:
            raise InvalidArgumentError(f"{name} {count}: a job has 1 to {MOST_RANKS} of them.")
    if job.ranks % job.nodes:
        near = max(job.nodes, round(job.ranks / job.nodes) * job.nodes)
        raise InvalidArgumentError(
            f"--ranks {job.ranks} can't be divided evenly between {job.nodes} nodes, and --ranks "
            f"is the number of all. Write --ranks {near}."
        )
    if not LEAST_GRACE_S <= job.grace <= MOST_GRACE_S:
        raise InvalidArgumentError(
            f"--grace {job.grace}: ranks may take 30 s to end after SIGTERM, so a pod needs "
            f"{LEAST_GRACE_S} s or more; Kubernetes takes up to {MOST_GRACE_S}."
        )


def _check_names(job: KubernetesJob) -> None:
    if len(job.image) > MOST_IMAGE or not IMAGE.fullmatch(job.image):
        raise InvalidArgumentError(
            f"--image {shown(job.image)} is no name of an image. Write it as in "
            f"ghcr.io/me/train:1.0, in lower case up to the tag."
        )
    named = {"--name": job.label, "--namespace": job.namespace, "--secret": job.secret,
             "--runtime": job.runtime}  # fmt: skip
    for option, name in named.items():
        pattern, most, rule = NAMES[option]
        if name is not None and (not pattern.fullmatch(name) or len(name) > most):
            derived = option == "--name" and job.name is None
            hint = " It is the script's: say another by --name." if derived else ""
            hint = " Is a variable of the shell empty?" if not (name or derived) else hint
            end = "and does not end" if pattern is LABEL else "nor ends"
            raise InvalidArgumentError(
                f"{option} {shown(name)} is no name in Kubernetes: that has up to {most} "
                f"lower-case {rule} {end} with a hyphen.{hint}"
            )


def _check_words(job: KubernetesJob) -> None:
    if not job.script or job.script.startswith("-"):
        raise InvalidArgumentError(
            f"{shown(job.script)} is no script: write the path that it has in the image."
        )
    if job.module and (not MODULE.fullmatch(job.script) or job.script.endswith(".py")):
        dotted = job.script.removesuffix(".py").strip("/.").replace("/", ".")
        raise InvalidArgumentError(
            f"-m {shown(job.script)} is no name of a module: write -m {dotted}, as for Python, or "
            f"leave out -m for a file."
        )
    for what, words in (("arguments", job.target), ("variables", job.env)):
        if len(words) > MOST_WORDS - 8:  # some are ours
            raise InvalidArgumentError(
                f"{len(words)} {what} are more than the {MOST_WORDS} that a TrainJob takes, with "
                f"ours. Put them in a file that the script reads."
            )
        for word in words:
            if re.search("[\0\ud800-\udfff]", word):
                raise InvalidArgumentError(
                    f"{shown(word)} is no text: a manifest holds Unicode without NUL."
                )


def _check_variables(job: KubernetesJob) -> None:
    names = [word.partition("=")[0] for word in job.env]
    for word, name in zip(job.env, names, strict=True):
        if "=" not in word or not ENV_NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"--env {shown(word)} is no variable. Write NAME=VALUE, with a name of letters, "
                f"digits and underscores."
            )
        if THEIRS.fullmatch(name):
            raise InvalidArgumentError(
                f"--env {name}: operators and launchers set it, to say which rank is which. Leave "
                f"it out."
            )
        if job.secret and name == "ROUNDELAY_SECRET":
            raise InvalidArgumentError(
                f"--env {name}: --secret {job.secret} gives it to the pods already, out of sight. "
                f"Leave out one of the two."
            )
        if names.count(name) > 1:
            raise InvalidArgumentError(f"--env {name} is given twice. Say it once.")


def refuse_elastic(job: KubernetesJob, why: str) -> None:
    """Raise why a kind of job has a fixed number of pods."""
    if job.elastic:
        raise InvalidArgumentError(
            f"--elastic: {why} Write `roundelay kube pytorchjob --elastic`, or leave it out."
        )


def refuse_runtime(job: KubernetesJob, kind: str) -> None:
    """Raise if a kind of job stands on no runtime, but one was named."""
    if job.runtime is not None:
        raise InvalidArgumentError(
            f"--runtime {job.runtime}: {kind} says all by itself and has none. Leave it out, or "
            f"write `roundelay kube trainjob --runtime {job.runtime}`."
        )


def check_pods(job: KubernetesJob, pod: Callable[[int], str]) -> None:
    """Raise if the last pod's name is longer than a host's name may be."""
    last = pod(job.nodes - 1)
    if len(last) > MOST_LABEL:
        raise InvalidArgumentError(
            f"--name {job.label}: {rank_count(job.ranks)} in pods up to {last}, whose names may "
            f"have {MOST_LABEL} characters. Take a name with {len(last) - MOST_LABEL} fewer."
        )
