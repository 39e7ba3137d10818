"""The list of required behaviour: what counts as proof, and what the check catches."""

import pytest

from tests.requirements_list import ROOT, ids_proved, main, read_rows

HEAD = "id,section,name,state,why\n"


@pytest.fixture
def root(tmp_path):
    """A project with three rows, one of them proven."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "requirements.csv").write_text(
        HEAD + "S001,Queues,add | append,,\nS002,Queues,swap,planned,later\nS003,Budgets,seqs,,\n"
    )
    (tmp_path / "tests").mkdir()
    write_test(tmp_path, '    """It is so. Proves S001."""')
    return tmp_path


def write_test(root, docstring: str, name: str = "test_it", file: str = "test_queue.py"):
    (root / "tests" / file).write_text(f"def {name}():\n{docstring}\n")


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("Proves S001.", ["S001"]),
        ("Proves S001, S003.", ["S001", "S003"]),
        (
            "A step. Proves S001,\n    S003 and S007 for the model side: so.",
            ["S001", "S003", "S007"],
        ),
        ("This proves S001, S004-S006, and S009.", ["S001", "S004", "S005", "S006", "S009"]),
        ("See S001. Disproves S002, improves S003.", []),
        ("One Proves S001. Two proves S002.", ["S001", "S002"]),
    ],
)
def test_rows_are_read_out_of_docstrings(docstring, ids):
    assert ids_proved(docstring) == ids


def test_the_page_has_a_state_for_every_row(root, capsys):
    assert main(root=root) == 0
    page = capsys.readouterr().out
    assert "| S001 | add \\| append | done | test_queue.py: test_it |" in page
    assert "| S002 | swap | planned | later |" in page
    assert "| S003 | seqs | open |  |" in page
    assert (
        "| done | 1 |\n| scheduler only | 0 |\n| planned | 1 |\n"
        "| not applicable | 0 |\n| open | 1 |\n"
        "| all | 3 |" in page
    )


def test_a_proof_outweighs_the_planned_state(root, capsys):
    write_test(root, '    """Proves S001, S002."""')
    main(root=root)
    assert "| S002 | swap | done |" in capsys.readouterr().out


def test_a_row_that_only_the_schedulers_tests_reach_is_not_done(root, capsys):
    table = root / "docs" / "requirements.csv"
    table.write_text(table.read_text().replace("swap,planned,later", "swap,scheduler only,no LoRA"))
    main(root=root)
    assert "| S002 | swap | open | no LoRA |" in capsys.readouterr().out
    write_test(root, '    """Proves S001, S002."""')
    main(root=root)
    page = capsys.readouterr().out
    assert "| S002 | swap | scheduler only | no LoRA; test_queue.py: test_it |" in page


def test_a_modules_docstring_speaks_for_the_whole_file(root, capsys):
    (root / "tests" / "test_more.py").write_text('"""Proves S003."""\n')
    main(root=root)
    page = capsys.readouterr().out
    assert "| S003 | seqs | done | test_more.py (all of it) |" in page


def test_the_check_names_a_row_that_no_test_proves(root, capsys):
    assert main(root=root, check=True) == 1
    assert "S003 is proven by no test; write `Proves S003.`" in capsys.readouterr().err
    write_test(root, '    """Proves S001, S003."""')
    assert main(root=root, check=True) == 0
    assert capsys.readouterr() == ("", "")


def test_an_id_that_no_row_has_is_a_problem(root, capsys):
    write_test(root, '    """Proves S999."""')
    assert main(root=root) == 1
    assert "test_queue.py::test_it proves S999" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "file"), [("make", "test_queue.py"), ("test_it", "driving.py")])
def test_a_proof_that_pytest_does_not_run_is_a_problem(root, capsys, name, file):
    write_test(root, '    """Proves S003."""', name, file)
    assert main(root=root) == 1
    assert f"{file}::{name} proves S003, but pytest does not run it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("S001,a,b,,\nS001,a,b,,\n", "there twice"),
        ("S1,a,b,,\n", "S and 3 digits"),
        ("S001,a,b,planned,\n", "with a reason"),
        ("S001,a,b,someday,why\n", "'someday'"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, row, words):
    path = tmp_path / "requirements.csv"
    path.write_text(HEAD + row)
    with pytest.raises(ValueError, match=words):
        read_rows(path)


def test_the_projects_table_has_every_row_in_order():
    rows = read_rows(ROOT / "docs" / "requirements.csv")
    assert [row.id for row in rows] == [f"S{number:03}" for number in range(1, 236)]
