"""Writes reports as `penstock bench --json` prints them, with given figures."""

import json


def figures(save=100.0, restore=100.0, partial_s=0.01, cores=0.1):
    """The figures of one round."""
    return {
        "save_bytes_per_s": save,
        "restore_bytes_per_s": restore,
        "partial_s": partial_s,
        "save_cores": cores,
        "restore_cores": cores,
    }


def row(kind, option, value, *rounds):
    """One configuration; the second of two or three rounds is its median."""
    median = rounds[len(rounds) // 2]
    return {"kind": kind, "option": option, "value": value, "median": median, "rounds": rounds}


def write_report(file, url, *rows, default=None):
    """Write a report with these rows after the default; the raw limit is 200 bytes per second."""
    default = default or [figures(99), figures(100), figures(101)]
    report = {
        "url": url,
        "engine": "posix",
        "direct_io": True,
        "local": True,
        "cold": True,
        "cores": 2.0,
        "bytes": 1 << 30,
        "raw": [{"blobs": 1, "write_bytes_per_s": 200.0, "read_bytes_per_s": 200.0}],
        "rows": [row("default", None, None, *default), *rows],
        "limit": "...",
    }
    file.write_text(json.dumps(report))
