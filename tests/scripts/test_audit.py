"""`scripts/audit.py` says "audited" only if every direct dependency was."""

import json
import sys

import pytest

from scripts import audit


def service(tmp_path, script):
    """A pip-audit that answers what this script makes of the pinned requirements."""
    file = tmp_path / "pip_audit.py"
    file.write_text(
        "import json, sys\n"
        "pins = open(sys.argv[sys.argv.index('-r') + 1]).read().split()\n"
        "packages = [dict(zip(('name', 'version'), pin.split('=='))) | {'vulns': []}"
        " for pin in pins]\n" + script
    )
    return [sys.executable, str(file)]


ANSWER = "print(json.dumps({'dependencies': packages}))\n"


def test_each_direct_dependency_has_a_reason_and_nothing_else_has():
    assert list(audit.REASONS) == audit.direct_dependencies()
    assert all(audit.licence(name)[1] not in ("", "unknown") for name in audit.REASONS)
    assert audit.licence("no-such-package") == ("not installed", "")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (ANSWER, []),
        (
            "packages[0]['vulns'] = [{'id': 'X-1', 'fix_versions': ['2']}]\n" + ANSWER,
            ["X-1, fixed in 2"],
        ),
        ("for p in packages: p['skip_reason'] = 'not found'\n" + ANSWER, "does not answer for"),
        (
            "[p.update(skip_reason='?') for p in packages if p['name'] == 'torch']\n" + ANSWER,
            "does not answer for torch;",
        ),
        ("sys.exit('ERROR: no network')", "ERROR: no network"),
        ("sys.exit(1)", "exit code 1"),
    ],
)
def test_what_was_not_checked_is_not_called_audited(tmp_path, monkeypatch, capsys, script, found):
    result = audit.known_vulnerabilities(service(tmp_path, script))
    if isinstance(found, str):
        assert found in result
        code = audit.NOT_AUDITED
    else:
        assert len(result) == len(found)
        assert all(words in line for words, line in zip(found, result, strict=True))
        code = audit.VULNERABLE if found else audit.CLEAN
    monkeypatch.setattr(audit, "known_vulnerabilities", lambda _command: result)
    assert audit.audit() == code
    printed = capsys.readouterr().out
    assert ("not audited:" in printed) == (code == audit.NOT_AUDITED)
    assert all(reason in printed for reason in audit.REASONS.values())


def test_what_is_asked_about_is_what_is_installed_by_the_names_of_pypi(tmp_path):
    dump = tmp_path / "pins"
    audit.known_vulnerabilities(
        service(tmp_path, f"open({str(dump)!r}, 'w').write(json.dumps(pins))\n" + ANSWER)
    )
    pins = json.loads(dump.read_text())
    assert {pin.split("==")[0] for pin in pins} >= set(audit.REASONS)
    assert not [pin for pin in pins if "+" in pin or pin.startswith("engine-core")]
