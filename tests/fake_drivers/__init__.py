"""Libraries in the place of a vendor's driver, which tests build with `cc`: devices on memory of the CPU.

They keep the rules of the real ones as far as these matter here: what belongs to a device is refused elsewhere, and so is code
for another architecture; a kernel's failure is told by a later call. A kernel runs in `on_launch`, a function of the test.
"""

import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile

import pytest

FOLDER = pathlib.Path(__file__).parent
Launched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint,
                            ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))  # fmt: skip


class FakeDriver:
    """One library; every one built has devices, calls and failures of its own.

    Attributes:
      path: of the file. launches: (device, kernel, stream) of each launch, in order.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.fake_log.restype = ctypes.c_char_p
        self.on_launch = lambda *_: 0
        self.launches: list[tuple[int, str, int]] = []
        self._callback = Launched(self._launched)
        self.library.fake_on_launch(self._callback)

    def _launched(self, device, image, name, blocks, threads, shared, stream, arguments) -> int:
        self.launches.append((device, name.decode(), stream or 0))
        return self.on_launch(device, image, name.decode(), blocks, threads, shared, arguments)

    def devices(self, *names: str) -> None:
        """One device per name: "9.0" of NVIDIA's, "gfx942:xnack-" of AMD's."""
        self.library.fake_devices(
            len(names), (ctypes.c_char_p * len(names))(*(n.encode() for n in names))
        )

    def current(self, device: int) -> None:
        """Does what a framework does before it launches: the calling thread is on a device; -1: on none."""
        self.library.fake_current(device)

    def fail(self, symbol: str, error: int, device: int = -1, times: int = -1) -> None:
        """Calls of a function are errors; 0: no more."""
        self.library.fake_fail(symbol.encode(), error, device, times)

    def break_device(self, device: int, error: int) -> None:
        """A kernel has failed: whatever the device is asked for is this error; 0: no more."""
        self.library.fake_break(device, error)

    def calls(self, symbol: str = "") -> list[str]:
        """ "symbol device" of the calls so far."""
        return [
            line
            for line in self.library.fake_log().decode().splitlines()
            if line.startswith(symbol)
        ]


@functools.cache
def _compiled(source: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "library.so"
        subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *flags, "-o", str(made),
                        str(FOLDER / source)], check=True)  # fmt: skip
        return made.read_bytes()


def built(source: str, folder: pathlib.Path, *flags: str) -> FakeDriver:
    """A library of its own: of "cuda.c" or "hip.c". Skips the test where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("there is no cc, which builds the fake driver")
    made = folder / f"{pathlib.Path(source).stem}{len(list(folder.iterdir()))}.so"
    made.write_bytes(_compiled(source, flags))
    return FakeDriver(made)
