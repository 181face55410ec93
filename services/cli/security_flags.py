"""The flags of TLS and of who is let in, as data (docs/security.md)."""

from __future__ import annotations

from services.cli import json_values, values
from services.cli.flag import Arity, Flag
from services.config import API_KEY_VARIABLE, TLS_DIR_VARIABLE

TLS_FLAGS = (
    Flag(
        ("--tls-dir",),
        values.path,
        "mutual TLS on all gRPC: a directory with ca.pem and, for each role that runs here, "
        f"ROLE.pem and ROLE.key, as stagemesh certs issue writes them (also {TLS_DIR_VARIABLE})",
        metavar="DIR",
        environment=TLS_DIR_VARIABLE,
    ),
    Flag(
        ("--require-tls",),
        values.switch,
        "refuse to start where a port would be without TLS, on loopback too",
        arity=Arity.SWITCH,
    ),
    Flag(
        ("--insecure",),
        values.switch,
        "allow a public --master-addr or --host without TLS",
        arity=Arity.SWITCH,
    ),
)
DOOR_FLAGS = (
    Flag(
        ("--api-key",),
        values.texts,
        "keys that clients may use (also STAGEMESH_API_KEY, which other users of "
        "the machine cannot read; with ray only there or in the file)",
        metavar="KEY",
        arity=Arity.MANY,
        environment=API_KEY_VARIABLE,
    ),
    Flag(
        ("--api-key-file",),
        values.path,
        "file with hashes of keys, as stagemesh keys writes it; read again when it changes",
        metavar="FILE",
    ),
    Flag(
        ("--ssl-certfile",),
        values.path,
        "certificate of the REST API, with its chain (PEM); read again when it changes",
        metavar="FILE",
    ),
    Flag(("--ssl-keyfile",), values.path, "its private key (PEM)", metavar="FILE"),
    Flag(
        ("--allowed-origins",),
        json_values.origins,
        "web pages that may call the REST API from a browser, like "
        "https://chat.example; default: none",
        metavar="ORIGIN",
        arity=Arity.MANY,
    ),
)
