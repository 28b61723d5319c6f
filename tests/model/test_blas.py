"""OpenBLAS is loaded before MLX; if it cannot be, the operator learns the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs OpenBLAS loaded")


def run(code: str) -> list[str]:
    """Run code in a new process, since loaded libraries stay loaded; return the lines that it prints."""
    command = [
        sys.executable,
        "-c",
        f"from worker.models.blas import BlasStatus, preload\nimport sys\n{code}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.splitlines()


def test_the_openblas_preload_finds_the_library_without_importing_mlx() -> None:
    library, advice, imported = run(
        "status = preload()\nprint(status.library, repr(status.advice), 'mlx.core' in sys.modules, sep='\\n')"
    )
    assert library.startswith("libopenblas")
    assert advice == "''"
    assert imported == "False"


def test_after_the_openblas_preload_the_process_uses_the_matrix_product_of_openblas() -> None:
    """The dynamic linker takes the first global symbol, which must be OpenBLAS's."""
    code = """
import ctypes
preload()
import mlx.core
process = ctypes.CDLL(None)
library = (ctypes.c_char_p * 4)()  # Dl_info: its first field is the file's name
process.dladdr(ctypes.cast(process.cblas_sgemm, ctypes.c_void_p), library)
print(library[0].decode())
"""
    assert "openblas" in run(code)[0]


def test_on_avx2_cpus_the_openblas_preload_selects_fast_kernels_unless_the_operator_chose_others() -> None:
    """OpenBLAS 0.3.21 does not know Xeons after Sapphire Rapids and would run SSE3 kernels on them."""
    flags = Path("/proc/cpuinfo").read_text().split()
    if "avx2" not in flags:
        pytest.skip("this processor has no fast kernels")
    code = "import ctypes\npreload()\nname = ctypes.CDLL(None).openblas_get_corename\n"
    code += "name.restype = ctypes.c_char_p\nprint(name().decode())"
    assert run(code) != ["Prescott"]
    assert run(f"import os\nos.environ['OPENBLAS_CORETYPE'] = 'Prescott'\n{code}") == ["Prescott"], (
        "an operator's own choice stays"
    )


def test_without_openblas_the_openblas_preload_reports_the_slowdown_and_the_command_that_installs_it() -> (
    None
):
    (line,) = run("status = preload(('libnothere.so.0',))\nprint(status)")
    assert "library=None, needed=True" in line
    assert "15 times slower" in line
    assert "apt-get install libopenblas0-pthread" in line


def test_an_openblas_preload_after_the_import_of_mlx_warns_that_openblas_is_not_used() -> None:
    assert "loaded after MLX and is not used" in run("import mlx.core\nprint(preload().advice)")[0]


def test_a_second_preload_of_openblas_returns_the_same_status_as_the_first() -> None:
    assert run("first = preload()\nimport mlx.core\nprint(preload() == first)") == ["True"]


def test_with_a_gpu_build_of_mlx_the_openblas_preload_loads_nothing_and_gives_no_advice() -> None:
    cuda = "from worker.models import blas\nblas._is_installed = lambda name: name == 'mlx-cuda-13'\n"
    assert run(cuda + "print(preload())") == ["BlasStatus(library=None, needed=False, advice='')"]


def test_the_openblas_preload_raises_an_error_with_the_extras_to_install_if_mlx_has_no_back_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    alone = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    (line,) = run(alone + "try:\n    preload()\nexcept Exception as error:\n    print(error)")
    assert line.startswith("MLX has no back end: pip install 'turnkeep[cpu]' ")


def test_with_two_installed_mlx_back_ends_the_openblas_preload_advises_to_uninstall_one_of_them() -> None:
    both = "from worker.models import blas\nblas._is_installed = {'mlx-cpu', 'mlx-cuda-13'}.__contains__\n"
    (line,) = run(both + "print(preload().advice)")
    assert line.startswith(
        "mlx-cpu and mlx-cuda-13 are both installed and own the same library; pip uninstall mlx-cpu"
    )
