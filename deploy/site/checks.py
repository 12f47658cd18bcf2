"""Checks of a site before its SuperNode starts, each with its remedy."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from packaging.requirements import Requirement

from fedstill.common.config import SiteFile, TaskConfig, TrainConfig
from fedstill.deploy.coordinator.certificates import read_certificate, weaknesses
from fedstill.deploy.coordinator.keys import fingerprint, public_half, read_key
from fedstill.deploy.site import probe

MOST_SECONDS = 60.0  # between the two clocks; the SuperLink refuses every call from 5 s ahead or 305 s behind on
CHECKPOINTS = 3  # checkpoints that a site keeps at the same time
GB = 1_000_000_000
Load = Callable[[], Any]


@dataclass(frozen=True)
class Check:
    """One line of the list."""

    name: str
    ok: bool
    said: str
    cure: str = ""


class Failed(Exception):
    """A check that did not pass, and its remedy."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure


def check_site(site: SiteFile, state: Path) -> Iterator[Check]:
    """Run all checks in the order in which a person would look; a failed check does not stop the others."""
    load = cache(lambda: _model(site))
    steps: list[tuple[str, Callable[[], str], str]] = [
        ("versions", versions, "install what fedstill asks for: pip install -U fedstill"),
        ("address", lambda: address(site), "check superlink in site.toml, the coordinator's firewall and yours"),
        ("TLS", lambda: tls(site), "ask the coordinator for its ca.crt and set root_certificates"),
        ("key", lambda: key(site), "make one with: fedstill keys new site.key"),
        ("clock", lambda: clock(site), "set this machine's clock by NTP: timedatectl set-ntp true"),
        ("registered", lambda: known(site), "send the public half to the coordinator: fedstill keys register"),
        ("data", lambda: data(site), "correct the file, or [data] in site.toml"),
        ("public data", lambda: public_data(site), "get the file that the others have, and compare: sha256sum"),
        ("model", lambda: model(site, load), "set model to a built-in one (fedstill models) or to a model's folder"),
        ("memory", lambda: memory(site, load), "take a smaller model or batch_size, or a larger machine"),
        ("disk", lambda: disk(load, state), "make room, or set state in site.toml to a folder on another disk"),
        ("limits", lambda: limits(site), "see `fedstill methods` and docs/tutorials/between-organisations.md"),
    ]
    for name, run_check, cure in steps:
        try:
            yield Check(name, True, run_check())
        except Failed as error:
            yield Check(name, False, str(error), error.cure)
        except (ValueError, OSError, probe.ProbeError, RuntimeError, MemoryError) as error:
            yield Check(name, False, " ".join(str(error).split()) or type(error).__name__, cure)


def versions() -> str:
    """Compare the installed versions with what fedstill requires."""
    wanted = {r.name: r for r in map(Requirement, metadata.requires("fedstill") or []) if r.marker is None}
    installed = {name: metadata.version(name) for name in ("fedstill", "flwr", "torch", "transformers")}
    for name, version in installed.items():
        if name in wanted and not wanted[name].specifier.contains(version, prereleases=True):
            raise Failed(
                f"{name} {version} is installed, and fedstill needs {wanted[name].specifier}",
                f"pip install '{name}{wanted[name].specifier}'",
            )
    return ", ".join(f"{name} {version}" for name, version in installed.items())


def address(site: SiteFile) -> str:
    """The SuperLink's port answers."""
    if site.superlink is None:
        raise Failed("site.toml names no SuperLink", 'write: superlink = "coordinator.example.org:9092"')
    return f"{site.superlink} answers from {probe.reach(site.superlink)}"


def tls(site: SiteFile) -> str:
    """Check the SuperLink's certificate against this site's authority."""
    if site.insecure:
        return "off (insecure = true): for a trial on one machine only"
    if site.root_certificates is None:
        raise Failed(
            "site.toml names no authority, so that anybody could pose as the coordinator",
            'write: root_certificates = "ca.crt"; or insecure = true for a trial on one machine',
        )
    reasons = weaknesses(read_certificate(site.root_certificates))
    if reasons:
        raise Failed(
            f"{site.root_certificates} must not be used: {'; '.join(reasons)}", "ask the coordinator for a new ca.crt"
        )
    assert_address(site)
    shown = probe.handshake(str(site.superlink), site.root_certificates)
    return f"trusted until {shown.not_valid_after_utc:%Y-%m-%d}"


def key(site: SiteFile) -> str:
    """Check that the private key can be used; show its public half."""
    if site.private_key is None:
        if site.insecure:
            return "none (insecure = true)"
        raise Failed(
            "site.toml names no private key",
            'make one: fedstill keys new site.key; and write: private_key = "site.key"',
        )
    public = public_half(read_key(site.private_key))
    return f"{fingerprint(public)}; its public half: {public}"


def clock(site: SiteFile) -> str:
    """Compare this machine's clock with the SuperLink's."""
    if site.insecure:
        return "not compared: a SuperLink without node authentication does not tell its time"
    _, authority, key = _trust(site)
    ahead = probe.clock_ahead(lambda d: probe.knock(str(site.superlink), authority, key, d).in_time)
    if ahead is None:
        raise Failed("is more than an hour away from the SuperLink's", "set it by NTP: timedatectl set-ntp true")
    if abs(ahead) > MOST_SECONDS:
        way = "behind" if ahead > 0 else "ahead of"
        raise Failed(
            f"is {abs(ahead):.0f} s {way} the SuperLink's", "set both by NTP: timedatectl set-ntp true on the wrong one"
        )
    return f"within {max(1, abs(round(ahead)))} s of the SuperLink's"


def known(site: SiteFile) -> str:
    """Check that the SuperLink knows this site's key."""
    if site.insecure:
        return "not needed (insecure = true)"
    address, authority, key = _trust(site)
    answer = probe.knock(address, authority, key)
    if not answer.in_time:
        raise Failed("cannot be seen while the clocks differ", "set the clock first")
    if not answer.known:
        public = public_half(key)
        raise Failed(
            f"the SuperLink does not know this key, {fingerprint(public)}",
            f"send the .pub file to the coordinator, who runs: fedstill keys register {site.name}.pub {site.name}",
        )
    return f"the SuperLink knows {fingerprint(public_half(key))}"


def _trust(site: SiteFile) -> tuple[str, Path, Any]:
    assert_address(site)
    if site.root_certificates is None or site.private_key is None:
        raise Failed("cannot be seen without root_certificates and private_key", "see above")
    probe.reach(str(site.superlink))
    return str(site.superlink), site.root_certificates, read_key(site.private_key)


def assert_address(site: SiteFile) -> None:
    """Refuse network checks without an address."""
    if site.superlink is None:
        raise Failed("cannot be seen without an address", "set superlink")


def data(site: SiteFile) -> str:
    """Check that the site's texts are there and have their columns; count each label."""
    if site.task is not None:
        from fedstill.common.data.site_tasks import Work

        work = Work(site.task, 0)
        return f"{site.task.kind}: {len(work.train)} texts to learn from, {len(work.test)} to test"
    if site.data is None:
        return "no files of its own: this site takes its share of the run's texts"
    task, pools = _own(site)
    counts = np.bincount(pools.train.labels, minlength=len(task.labels))
    dropped = sum(pools.dropped.values())
    listed = ", ".join(f"{label} {count}" for label, count in zip(task.labels, counts, strict=True))
    return f"{len(pools.train)} texts: {listed}" + (f"; {dropped} blank ones left out" if dropped else "")


def _own(site: SiteFile) -> tuple[Any, Any]:
    from fedstill.common.data.tasks import load_task

    assert site.data is not None
    data = site.data
    settings = {"train": data.private, "public": data.public, "text": data.text, "label": data.label}
    return load_task(TaskConfig.model_validate({"name": "files", **settings, "labels": site.labels}))


def public_data(site: SiteFile) -> str:
    """Check that the public file is the agreed one."""
    if site.data is None or site.data.public is None:
        return "no file of its own: the run's public texts"
    with site.data.public.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if site.public_hash is None:
        return f"sha256 {digest}; write public_hash to have it compared"
    if digest != site.public_hash:
        raise Failed(
            f"{site.data.public} has sha256 {digest[:16]}..., agreed was {site.public_hash[:16]}...",
            "get the file that the others have, and compare: sha256sum",
        )
    return f"sha256 {digest[:16]}... as agreed"


def model(site: SiteFile, load: Load) -> str:
    """Check that the model loads on its device."""
    loaded = load()
    return f"{site.model}: {sum(p.numel() for p in loaded.parameters()):,} parameters on {_places(loaded)}"


def _model(site: SiteFile) -> Any:
    settings = site.model_settings(TrainConfig())
    if site.task is not None:
        from fedstill.common.data.site_tasks import Work
        from fedstill.common.models.bert2bert import load_mixed

        return load_mixed(settings, Work(site.task, 0).outputs, 0)
    from fedstill.common.data.tasks import TASKS, Task
    from fedstill.common.models.loading import load_model

    if site.labels:
        task = Task("check", tuple(site.labels))
    else:
        task = TASKS["film-reviews"] if site.data is None else _own(site)[0]
    return load_model(settings, task, 0)


def _loaded(load: Load) -> Any:
    try:
        return load()
    except Exception:
        raise Failed("cannot be seen while the model does not load", "cure that first") from None


def memory(site: SiteFile, load: Load) -> str:
    """Check that the model with gradients and AdamW's two moments fits into memory, with a batch of full length."""
    loaded = _loaded(load)
    weights = sum(p.numel() * p.element_size() for p in loaded.parameters())
    trained = sum(p.numel() * p.element_size() for p in loaded.parameters() if p.requires_grad)
    need, room = weights + 3 * trained, _room(loaded)
    if need > room:
        raise Failed(
            f"training needs {need / GB:.1f} GB for the model alone, and {room / GB:.1f} GB are free",
            "take a smaller model, [lora], or a larger machine",
        )
    if site.task is not None:
        return f"{need / GB:.2f} GB for the model in training, {room / GB:.1f} GB free; a batch was not tried"
    train = TrainConfig()
    size, length = site.batch_size or train.batch_size, site.max_length or train.max_length
    batch = loaded.encode(["word " * length] * size).batch(np.arange(size))
    loaded.train()
    loaded({name: value.to(loaded.device) for name, value in batch.items()}).square().mean().backward()
    left = _room(loaded)
    if left < 2 * trained:
        raise Failed(
            f"after one batch of {size} texts {left / GB:.1f} GB are free, and the optimizer needs "
            f"{2 * trained / GB:.1f} GB",
            f"set batch_size below {size} in site.toml",
        )
    tried = f"a batch of {size} x {length} passed"
    return f"{need / GB:.2f} GB for the model in training, and {tried}; {left / GB:.1f} GB free"


def _room(loaded: Any) -> int:
    """Return the free bytes where the model is, on all its devices together."""
    import torch

    return sum(
        int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else int(psutil.virtual_memory().available)
        for device in loaded.devices
    )


def _places(loaded: Any) -> str:
    return ", ".join(str(device) for device in loaded.devices)


def disk(load: Load, state: Path) -> str:
    """Check that the state folder is writable and has room for a run's checkpoints."""
    state.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=state) as file:
        file.write(b"fedstill")
        file.flush()
        os.fsync(file.fileno())
    loaded = _loaded(load)
    need = CHECKPOINTS * 3 * sum(p.numel() * p.element_size() for p in loaded.parameters())
    free = shutil.disk_usage(state).free
    if need > free:
        raise Failed(
            f"{state}: {free / GB:.1f} GB free, and {CHECKPOINTS} checkpoints need {need / GB:.1f} GB",
            "make room, or set state in site.toml to a folder on another disk",
        )
    return f"{state}: {free / GB:.1f} GB free, {need / GB:.2f} GB needed"


def limits(site: SiteFile) -> str:
    """Describe what may leave; refuse verbs that do not exist."""
    from fedstill.strategies import all_verbs

    limits, known = site.limits, all_verbs()
    wrong = [verb for verb in limits.verbs or [] if verb not in known]
    if wrong:
        raise Failed(f"limits.verbs names {', '.join(wrong)}", f"known: {', '.join(sorted(known))}")
    parts = [f"may leave: {', '.join(limits.leave) or 'nothing but a few numbers'}"]
    parts += [f"only {', '.join(limits.verbs)}"] if limits.verbs is not None else []
    parts += [f"at most {limits.mb_per_run:g} MB a run"] if limits.mb_per_run is not None else []
    parts += [f"at most {limits.mb_per_day:g} MB a day"] if limits.mb_per_day is not None else []
    parts += ["a run may name files on this disk"] if limits.run_files else []
    parts += [f"secure sums with {', '.join(_peers(site.peers))} alone"] if site.peers is not None else []
    return "; ".join(parts)


def _peers(folder: Path) -> list[str]:
    """Return the sites whose public keys are here; refuse a folder without one, and keys that are none."""
    cure = "get each other site's .pub file from its owner, and put it there as NAME.pub"
    keys = sorted(folder.glob("*.pub")) if folder.is_dir() else []
    if not keys:
        raise Failed(f"peers = {folder}: has no NAME.pub, so this site sums nothing with anybody", cure)
    for path in keys:
        try:
            known = isinstance(serialization.load_ssh_public_key(path.read_bytes()), ec.EllipticCurvePublicKey)
        except (ValueError, UnsupportedAlgorithm):
            known = False
        if not known:
            raise Failed(f"{path}: is no ECDSA public key", cure)
    return [path.stem for path in keys]
