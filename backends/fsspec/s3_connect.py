"""A client of botocore as this backend wants it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.backends.fsspec.s3_wire import Wire
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backends.fsspec.config import FsspecConfig, S3Options

# All that move many bytes; each may be sent twice.
_CARRIED = ("UploadPart", "GetObject")


def connect(config: FsspecConfig, options: S3Options) -> tuple[Any, Wire | None]:
    """A client of botocore, and what carries its parts and ranges; it connects to nothing yet.

    Raises:
        ConfigError: botocore is missing.
    """
    try:
        import botocore.session  # noqa: PLC0415 - 140 ms, and an extra
        from botocore import UNSIGNED  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415
        from botocore.utils import get_environ_proxies  # noqa: PLC0415
    except ImportError as error:
        msg = f"{config.shown_url}: S3 needs botocore: pip install 'penstock[s3]'"
        raise ConfigError(msg) from error
    s3: dict[str, Any] = {"payload_signing_enabled": False}  # 0.6 s of SHA-256 per GiB
    if options.addressing_style != "auto":
        s3["addressing_style"] = options.addressing_style
    session = botocore.session.Session(profile=options.profile)
    verify: bool | str | None = options.verify
    if verify is True:  # the environment may name a file
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    connect_s = min(10.0, config.timeout_s)
    client = session.create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        verify=verify,
        aws_access_key_id=options.key,
        aws_secret_access_key=options.secret,
        aws_session_token=options.token,
        config=Config(
            connect_timeout=connect_s,
            read_timeout=config.timeout_s,
            max_pool_connections=config.parallel + 4,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Checksums of ours bind every stored byte; a CRC of each part is sent besides.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if options.anon else None,
            s3=s3,
        ),
    )
    place = client.meta.endpoint_url
    if get_environ_proxies(place).get(urlsplit(place).scheme):  # not all that is set is for it
        return client, None
    wire = Wire(
        verify=True if verify is None else verify,
        connect_s=connect_s,
        timeout_s=config.timeout_s,
    )
    for operation in _CARRIED:
        client.meta.events.register(f"before-send.s3.{operation}", wire.send)
    return client, wire
