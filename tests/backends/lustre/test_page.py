"""The page on Lustre lists the existing options."""

import re
from pathlib import Path

from penstock.backends.local.base import LocalConfig
from penstock.backends.lustre import LustreConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lustre.md"


def test_the_option_table_is_complete_with_defaults():
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    defaults = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {
        n: f for n, f in LustreConfig.model_fields.items() if n not in LocalConfig.model_fields
    }
    assert defaults.keys() == fields.keys()
    for name, field in fields.items():
        default = defaults[name].strip('`"')
        assert default == (
            "none"
            if field.default == ""
            else f"{field.default:g}"
            if isinstance(field.default, float)
            else str(field.default)
        )
