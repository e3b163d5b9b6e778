"""How other hosts may read the metrics: TLS and passwords, by a file in the web-config form of Prometheus and its exporters.

The file, and the certificates that it names, are read again when they change. What an open listener can't take over waits for
a restart: TLS on or off, its versions, whether clients are asked for certificates. So does a file without any user where there
was one, as a file is that was just cut off. Paths in it are relative to its folder.

Source: github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import bcrypt
import structlog
import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from honed.daemon.errors import HonedError, SettingsError, refused
from honed.daemon.settings import listen
from honed.daemon.settings.plain_errors import sentence
from honed.daemon.settings.sections import HttpSettings

log = structlog.get_logger("honed.http")

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENT_CERTIFICATES = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
Stamp: TypeAlias = tuple[tuple[int, ...], ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(_Part):
    """`tls_server_config`; OpenSSL chooses ciphers and curves."""

    cert_file: Path
    key_file: Path
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"

    @model_validator(mode="after")
    def _has_an_authority(self) -> Tls:
        if self.client_auth_type != "NoClientCert" and self.client_ca_file is None:
            raise ValueError(f"client_auth_type {self.client_auth_type} needs a client_ca_file")
        return self

    def context(self, folder: Path) -> ssl.SSLContext:
        """Load the files. Raises OSError or ssl.SSLError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version, made.maximum_version = VERSIONS[self.min_version], VERSIONS[self.max_version]
        made.load_cert_chain(folder / self.cert_file, folder / self.key_file, password="")
        made.verify_mode = CLIENT_CERTIFICATES[self.client_auth_type]
        if self.client_ca_file is not None:
            made.load_verify_locations(folder / self.client_ca_file)
        return made


class Http(_Part):
    """`http_server_config`; HTTP/2 is never spoken, whatever is said."""

    http2: bool = True


class WebConfig(_Part):
    """The file."""

    tls_server_config: Tls | None = None
    http_server_config: Http = Http()
    basic_auth_users: dict[str, str] = {}
    """User -> bcrypt hash of the password."""

    @field_validator("basic_auth_users")
    @classmethod
    def _are_hashes(cls, users: dict[str, str]) -> dict[str, str]:
        for user, hashed in users.items():
            try:
                bcrypt.checkpw(b"", hashed.encode())
            except ValueError as error:
                text = f"the password of {user!r} isn't a bcrypt hash: make one with `htpasswd -nBC 10 {user}`"
                raise ValueError(text) from error
        return users


class WebConfigFile:
    """A file, read again when it or a certificate has changed.

    Args:
        path: the file.

    Raises:
        SettingsError: it, or what it names, may not be read, or says something unknown.
        StartError: it, or what it names, can't be read now, or the certificate isn't its key's yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: Stamp | None = None
        self.fault = ""
        """Why the last change isn't in use."""
        self.config, self.context = _load(path)
        self._stamp = self._stamp_now()

    def refresh(self) -> None:
        """Read the files again if one of them has changed; while they can't be used, the last ones hold."""
        stamp = self._stamp_now()
        if stamp == self._failed:
            return
        if stamp == self._stamp:
            self.fault = ""  # the change was taken back
            return
        try:
            config, context = _load(self._path)
            if change := _needs_a_restart(self.config, config):
                raise SettingsError(f"the web config {self._path} {change}: restart honed for that")
        except HonedError as error:
            self._failed, self.fault = stamp, str(error)
            log.warning("the changed web config can't be used, so the last one holds", error=str(error))
        else:
            self.config, self.context = config, context
            self._stamp, self.fault = self._stamp_now(), ""

    def first_context(self) -> ssl.SSLContext | None:
        """The TLS context to begin connections with; each goes on with the newest. None: no TLS."""
        if self.context is None:
            return None

        def use_newest(connection: ssl.SSLObject, name: str | None, before: ssl.SSLContext) -> None:
            self.refresh()
            if self.context is not None and self.context is not before:
                connection.context = self.context

        made = self.context
        made.sni_callback = use_newest  # also called where the client names no host
        return made

    def _stamp_now(self) -> Stamp:
        files, tls = [self._path], self.config.tls_server_config
        if tls is not None:
            named = (tls.cert_file, tls.key_file, tls.client_ca_file)
            files += [self._path.parent / file for file in named if file is not None]
        return tuple(_stamp_of(file) for file in files)


def web_config_of(http: HttpSettings) -> WebConfigFile | None:
    """The file of `http.metrics_web_config`; None if none is named.

    Raises:
        SettingsError: it can't be used, or leaves an address that other hosts reach without TLS.
        StartError: it can't be used now.
    """
    if http.metrics_web_config is None:
        return None
    file = WebConfigFile(http.metrics_web_config)
    host, _ = listen.check_address(http.metrics_listen, why_only_loopback="")
    if file.context is None and not http.metrics_plaintext and not listen.is_loopback(host):
        raise SettingsError(
            f"{http.metrics_web_config} has no tls_server_config, so all would be readable on the network: add it, or set "
            "http.metrics_plaintext = true"
        )
    return file


def _needs_a_restart(before: WebConfig, after: WebConfig) -> str:
    """What a changed file asks for that takes a restart, as the end of a sentence; empty if nothing does."""
    old, new = before.tls_server_config, after.tls_server_config
    if (old is None) != (new is None):
        return f"turns TLS {'on' if old is None else 'off'}"
    if old is not None and new is not None:
        if old.client_auth_type != new.client_auth_type:
            return "changes client_auth_type"
        if (old.min_version, old.max_version) != (new.min_version, new.max_version):
            return "changes the versions of TLS"
    return "has no users any more" if before.basic_auth_users and not after.basic_auth_users else ""


def _load(path: Path) -> tuple[WebConfig, ssl.SSLContext | None]:
    where = f"the web config {path}"
    try:
        found = WebConfig.model_validate(yaml.safe_load(path.read_text()) or {})
    except OSError as error:
        raise refused(f"{where} can't be read: {error.strerror}", error) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} isn't YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise SettingsError(f"{where}: {'; '.join(map(_fault, error.errors()))}") from error
    if found.tls_server_config is None:
        return found, None
    try:
        return found, found.tls_server_config.context(path.parent)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError: in a renewal the certificate may come before its key
        text = f"{where}: the certificate, its key or the clients' authority can't be used: {error}"
        raise (refused(text, error) if isinstance(error, OSError) else SettingsError(text)) from error


def _fault(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors, as a sentence with the full name of what it's about."""
    names = list(map(str, error["loc"]))
    parts: dict[str, type[_Part]] = {"tls_server_config": Tls, "http_server_config": Http}
    kind = parts.get(names[0], WebConfig) if names[1:] else WebConfig
    colon = ":" if error["type"] == "value_error" else ""
    return f"{'.'.join(names) or 'the file'}{colon} {sentence(error, list(kind.model_fields))}"


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
