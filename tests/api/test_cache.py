"""Programs on disk: found by other processes, never half written, rebuilt where damaged, bounded, and not needed."""

import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.measured import tuned_choices
from pbkern.cli import main
from pbkern.core import config
from pbkern.core.errors import InternalError
from pbkern.core.process import disk_cache
from pbkern.dsl.build_programs import kernel_program
from pbkern.targets.cpu.target import CpuTarget
from pbkern.targets.host.objects import cache_key, elf_loader, object_code
from pbkern.targets.host.runtime_symbols import runtime_symbols
from tests.cores import of_several_cores

X = np.random.default_rng(0).normal(size=(64, 128)).astype("f")


@pytest.fixture
def store(tmp_path):
    """An empty store, and a target that has compiled nothing yet."""
    with config.override(cache_dir=tmp_path / "kept", cache=True):
        yield disk_cache.current()


def program(f, *args):
    """The one HostProgram of a function."""
    build, _ = pbkern.jit(f).build(args, {})
    (found,) = build.programs
    return found


def compiled(f, *args, options=None):
    """f's program compiled by a target that knows nothing, as in a new process."""
    return CpuTarget().compile(program(f, *args), options or pbkern.CompileOptions())


def code_files(store):
    return [p for p, _ in store.entries() if p.name.startswith("code-")]


def norm(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


# --- hits -----------------------------------------------------------------------------------------------------------

CHILD = """
    import json, sys, time
    import jax, jax.numpy as jnp, numpy as np
    import pbkern
    from pbkern.targets.host import compile as host_compile

    @pbkern.jit
    def f(x):
        return jnp.sort(jnp.tanh(x) * 2 + jnp.cumsum(x, 1), axis=1), x.astype(jnp.float16), jnp.sin(x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)).astype("f"))
    results = [np.asarray(a, np.float64).sum() for a in f(x)]
    (c,) = host_compile._resident
    print(json.dumps({
        "from_disk": c.from_disk, "results": results, "ms": sum(c.times.values()),
        "mlir": any(m.split(".")[0] in ("mlir", "torch_mlir") for m in sys.modules),
    }))
"""


def child(folder, **environment):
    env = os.environ | {"PBKERN_CACHE_DIR": str(folder)} | environment
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_neither_lowers_nor_imports_mlir(tmp_path):
    first, second = child(tmp_path), child(tmp_path)
    assert not first["from_disk"]
    assert first["mlir"]
    assert second["from_disk"]
    assert not second["mlir"]
    assert second["results"] == first["results"]
    assert second["ms"] < first["ms"] / 4


def test_the_environment_switches_it_off(tmp_path):
    child(tmp_path, PBKERN_CACHE="0")
    assert not list(tmp_path.iterdir())


def test_a_hit_computes_the_same_and_shows_the_same_stages(store):
    fresh, found = compiled(norm, X), compiled(norm, X)
    assert not fresh.from_disk
    assert found.from_disk
    np.testing.assert_array_equal(fresh(X)[0], found(X)[0])
    target = CpuTarget()
    for stage in ("nests", "mlir", "llvm"):
        assert target.text(found, stage) == target.text(fresh, stage) != ""
    assert found.code == fresh.code
    assert fresh.code.arena_bytes > 0


@of_several_cores
def test_content_and_options_decide(store):
    compiled(norm, X)
    exact = pbkern.CompileOptions(mlir_disable_fast_math=True)
    assert not compiled(norm, X[:32]).from_disk
    assert not compiled(lambda x: norm(x) + 1, X).from_disk
    assert not compiled(norm, X, options=exact).from_disk
    with config.override(num_threads=1):
        assert not compiled(norm, X).from_disk
    assert compiled(norm, X).from_disk
    assert compiled(norm, X, options=exact).from_disk


def checked(x, kernel_name):
    def body(x_ref, o_ref):
        pbkern.check(x_ref[0, 0] < 100.0, "{} is too much", x_ref[0, 0])
        o_ref[...] = x_ref[...] * 2

    return pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name=kernel_name)(
        x
    )


def test_names_count_only_where_code_tells_them(store):
    compiled(norm, X)
    assert compiled(lambda y: norm(y), X).from_disk
    for name in ("one", "another"):
        with pytest.raises(Exception, match=f"200.0 is too much[^`]*kernel `{name}`"):
            jax.block_until_ready(pbkern.jit(lambda x, name=name: checked(x, name))(X * 0 + 200))


def test_parts_that_are_alike_share_their_code():
    def f(a):
        for _ in range(4):
            a = jnp.linalg.cholesky(a @ a.T + 10 * jnp.eye(40, dtype=a.dtype)) * 0.25
        return a

    a = np.random.default_rng(0).random((40, 40), np.float32)  # smaller ones are kernels
    build, _ = pbkern.jit(f).build((a,), {})
    target = CpuTarget()
    codes = [target.compile(p, pbkern.CompileOptions()) for p in build.programs]
    assert len(build.programs) == 5
    assert len(set(codes)) == 3
    np.testing.assert_allclose(pbkern.jit(f)(a), jax.jit(f)(a), rtol=1e-5, atol=1e-6)
    assert pbkern.jit(f).as_text(a, stage="mlir").count("func.func @k0_") == 3


def test_the_environment_decides(store, monkeypatch):
    compiled(norm, X)
    for name, value in (("sources", "others"), ("processor", ("other",))):
        cache_key.environment.cache_clear()
        with monkeypatch.context() as m:
            m.setattr(cache_key, name, lambda value=value: value)
            assert not compiled(norm, X).from_disk
        cache_key.environment.cache_clear()
    assert compiled(norm, X).from_disk


def test_kernels_of_one_name_are_told_apart():
    rows = pbkern.BlockSpec((8, 128), lambda i: (i, 0))

    def kernel(k):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * k

        shape = jax.ShapeDtypeStruct(X.shape, "float32")
        return pbkern.kernel(body, out_shape=shape, grid=(8,), in_specs=[rows], out_specs=rows)

    two, three = kernel(2.0), kernel(3.0)
    for chain in ((two, three, two), (two, three, three)):
        want = X * np.prod([{two: 2, three: 3}[k] for k in chain])
        f = lambda x, chain=chain: chain[2](chain[1](chain[0](x)))
        np.testing.assert_allclose(pbkern.jit(f)(X), want, rtol=1e-6)


def test_printing_kernels_are_compiled_by_each_process(store, capfd):
    def f(x):
        jax.debug.print("first {}", x[0, 0])
        return x * 2

    def body(x_ref, o_ref):
        jax.debug.print("first {}", x_ref[0, 0])
        o_ref[...] = x_ref[...] * 2

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))
    host = kernel_program(kernel.trace(X))
    one, other = (CpuTarget().compile(host, pbkern.CompileOptions()) for _ in range(2))
    assert not other.from_disk
    assert object_code.prints(other.code)
    for c in (one, other):
        c(X)
    assert capfd.readouterr().out.count(f"first {X[0, 0]}"[:9]) == 2


# --- damage and company ---------------------------------------------------------------------------------------------


def damaged_ways(whole: bytes):
    yield "empty", b""
    yield "truncated", whole[: len(whole) // 2]
    yield "last byte missing", whole[:-1]
    yield "garbage", os.urandom(len(whole))
    yield "one bit", whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    yield "another's", disk_cache.MAGIC + disk_cache._checksum("code", "other", b"x") + b"x"


def test_damaged_entries_are_made_again(store):
    want = compiled(norm, X)(X)[0]
    (path,) = code_files_of(store, norm)
    whole = path.read_bytes()
    for what, content_ in damaged_ways(whole):
        path.write_bytes(content_)
        again = compiled(norm, X)
        assert not again.from_disk, what
        np.testing.assert_array_equal(again(X)[0], want)
        assert path.read_bytes() == whole, what
    assert compiled(norm, X).from_disk


def code_files_of(store, f):
    """Files of f's program: all but the runtime's, which is written before."""
    runtime = disk_cache.digest(("runtime", cache_key.environment()))
    return [p for p in code_files(store) if runtime not in p.name]


def test_an_entry_that_is_whole_but_no_object_is_made_again(store):
    compiled(norm, X)
    (path,) = code_files_of(store, norm)
    key = path.stem.removeprefix("code-")
    for payload in (b"{}\n", b'{"arena_bytes": 64}\nno object', b"\xff\xfe"):
        assert store.put("code", key, payload)
        assert not compiled(norm, X).from_disk
        assert compiled(norm, X).from_disk


def write_and_read(folder, seed, failures, barrier):
    """Writes and reads entries of a few keys as fast as it can; every read must be whole."""
    barrier.wait(60)
    s, rng = disk_cache.DiskStore(folder, 1 << 20), np.random.default_rng(seed)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        key = str(rng.integers(3))
        expected = {key.encode() * n for n in (10, 100_000)}
        s.put("code", key, key.encode() * int(rng.choice([10, 100_000])))
        if (found := s.get("code", key)) is not None and found not in expected:
            failures.put(f"{len(found)} bytes")
        if found is None:
            failures.put("an entry vanished")


def test_processes_do_not_disturb_each_other(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures, barrier = context.Queue(), context.Barrier(2)
    workers = [
        context.Process(target=write_and_read, args=(tmp_path, n, failures, barrier))
        for n in range(2)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0, 0]
    assert failures.empty()
    assert not list(tmp_path.glob(".new-*"))


def test_two_processes_may_compile_the_same_at_once(tmp_path):
    env = os.environ | {"PBKERN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [
        json.loads(p.communicate(timeout=300)[0].splitlines()[-1])["results"] for p in running
    ]
    assert results[0] == results[1]
    assert child(tmp_path)["from_disk"]


# --- bounds and permissions -----------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    s = disk_cache.DiskStore(tmp_path, 10_000)
    for n in range(9):
        s.put("code", str(n), bytes(900))
        os.utime(tmp_path / f"code-{n}.pbk", (1000 + n, 1000 + n))
    assert s.get("code", "0") is not None  # used: young again
    for n in range(9, 13):
        s.put("code", str(n), bytes(900))
    assert s.size() <= s.limit
    assert s.get("code", "0") is not None
    assert s.get("code", "12") is not None
    assert s.get("code", "1") is None
    assert s.get("code", "2") is None


def test_an_entry_larger_than_all_is_not_written(tmp_path):
    s = disk_cache.DiskStore(tmp_path, 1000)
    assert not s.put("code", "a", bytes(2000))
    assert s.size() == 0


@pytest.mark.parametrize("what", ["a file", "below a file", "open to all", "open to a group"])
def test_a_folder_that_cannot_be_used_costs_one_warning(tmp_path, what):
    folder = tmp_path / "kept"
    if what.startswith("open"):
        folder.mkdir()
        folder.chmod(0o777 if what == "open to all" else 0o770)
    else:
        folder.write_text("")
        folder = folder / "deeper" if what == "below a file" else folder
    with (
        config.override(cache_dir=folder),
        pytest.warns(UserWarning, match="keeps nothing on disk") as caught,
    ):
        results = [compiled(norm, X) for _ in range(3)]
    assert len(caught) == 1
    assert str(folder) in str(caught[0].message)
    assert not any(c.from_disk for c in results)
    np.testing.assert_allclose(results[-1](X)[0], np.asarray(norm(X)), rtol=1e-5)


@pytest.mark.parametrize("what", ["open to a group", "of another user"])
def test_entries_that_others_may_have_written_are_not_loaded(store, monkeypatch, what):
    compiled(norm, X)
    (path,) = code_files_of(store, norm)
    if what == "open to a group":
        path.chmod(0o664)
    else:
        if os.getuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, 65534, -1)
    reader = disk_cache.DiskStore(store.folder, store.limit)
    with pytest.warns(UserWarning, match="other users may have written its entry") as caught:
        assert [reader.get("code", path.stem.removeprefix("code-")) for _ in range(2)] == [
            None,
            None,
        ]
    assert len(caught) == 1
    assert "chmod go-w" in str(caught[0].message)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_others_may_read_entries_as_the_umask_says_and_nobody_else_writes_them(store, umask, mode):
    before = os.umask(umask)
    try:
        assert store.put("code", "a", b"x")
    finally:
        os.umask(before)
    (path,) = code_files(store)
    assert path.stat().st_mode & 0o777 == mode


def test_shared_folders_are_read_and_never_changed(tmp_path):
    filled, own = tmp_path / "image", tmp_path / "own"
    with config.override(cache_dir=filled, cache=True):
        want = compiled(norm, X)(X)[0]
    (tmp_path / "empty").mkdir()
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in filled.iterdir()}
    with config.override(
        cache_dir=own, cache=True, cache_shared=(tmp_path / "empty", tmp_path / "missing", filled)
    ):
        again = compiled(norm, X)
        assert again.from_disk
        np.testing.assert_array_equal(again(X)[0], want)
        assert not compiled(lambda x: norm(x) + 1, X).from_disk
        shared = disk_cache.current().shared[-1]
        shared.remove("code", "a")
        assert not shared.put("code", "a", b"x")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in filled.iterdir()} == before
    assert (
        len(code_files(disk_cache.DiskStore(own, 1))) == 1
    )  # the second function; the first is not copied


def test_a_damaged_entry_of_a_shared_folder_stays_there_and_is_made_again(tmp_path):
    filled = disk_cache.DiskStore(tmp_path / "image", 1 << 20)
    filled.put("code", "a", b"x")
    (path,) = code_files(filled)
    path.write_bytes(b"damaged")
    reader = disk_cache.DiskStore(
        tmp_path / "own", 1 << 20, (disk_cache.DiskStore(filled.folder, 0, read_only=True),)
    )
    assert reader.get("code", "a") is None
    assert path.read_bytes() == b"damaged"


def test_a_shared_folder_that_others_may_write_to_is_not_read(tmp_path):
    filled = disk_cache.DiskStore(tmp_path / "image", 1 << 20)
    filled.put("code", "a", b"x")
    filled.folder.chmod(0o775)
    reader = disk_cache.DiskStore(
        tmp_path / "own", 1 << 20, (disk_cache.DiskStore(filled.folder, 0, read_only=True),)
    )
    with pytest.warns(UserWarning, match="PBKERN_CACHE_SHARED names another folder"):
        assert reader.get("code", "a") is None
    assert reader.put("code", "a", b"y")
    assert reader.get("code", "a") == b"y"


def test_shared_folders_are_listed_in_the_environment():
    found = config.read({"PBKERN_CACHE_SHARED": os.pathsep.join(["/opt/kernels", "", "~/more"])})
    assert found.cache_shared == (pathlib.Path("/opt/kernels"), pathlib.Path("~/more"))


FAILS = """
import os, sys, warnings
import jax.numpy as jnp
import numpy as np
import pbkern
from pbkern.targets import mlir
from pbkern.core.errors import InternalError

calls, working = 0, mlir.object_code
def broken(module, level, function, symbols):
    global calls
    if not symbols:  # the runtime's own code
        return working(module, level, function, symbols)
    calls += 1
    raise InternalError("LLVM made no code for `f`", why="a test breaks it")
mlir.object_code = broken
x = np.linspace(0, 1, 640, dtype="f").reshape(8, 80)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        y = pbkern.jit(lambda x: jnp.tanh(x) * 2)(x)
        np.testing.assert_allclose(y, np.tanh(x) * 2, rtol=1e-5)
    except InternalError as e:
        print("error:", e.what, end="; ")
texts = [str(w.message) for w in caught if "compiling" in str(w.message)]
print(calls > 0, len(texts), any("kept from an earlier process" in t for t in texts))
"""


def test_a_failure_to_compile_is_remembered(tmp_path):
    def child(**environment):
        env = os.environ | {"PBKERN_CACHE_DIR": str(tmp_path), "PBKERN_FALLBACK": "1"} | environment
        run = subprocess.run(
            [sys.executable, "-c", FAILS], env=env, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert child() == "True 1 False"
    assert child() == "False 1 True"
    assert child(PBKERN_FALLBACK="0") == "error: LLVM made no code for `f`; True 0 False"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_read(store):
    compiled(norm, X)
    store.folder.chmod(0o500)
    try:
        reader = disk_cache.DiskStore(store.folder, store.limit)
        with pytest.warns(UserWarning, match="keeps nothing on disk"):
            assert not reader.put("code", "a", b"x")
        (path,) = code_files_of(store, norm)
        assert reader.get("code", path.stem.removeprefix("code-")) is not None
    finally:
        store.folder.chmod(0o700)


def test_a_folder_without_write_permission_costs_one_warning(store, monkeypatch):
    store.folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.warns(UserWarning, match="may not be written to") as caught:
        assert not store.put("code", "a", b"x")
        assert not store.put("code", "b", b"x")
    assert len(caught) == 1


def test_what_can_be_read_is_read_where_nothing_can_be_written(store, monkeypatch):
    assert store.put("code", "a", b"x")
    reader = disk_cache.DiskStore(store.folder, store.limit)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "utime", lambda path: (_ for _ in ()).throw(PermissionError()))
    with pytest.warns(UserWarning, match="may not be written to"):
        assert not reader.put("code", "b", b"y")
    assert reader.get("code", "a") == b"x"
    assert reader.get("code", "b") is None


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    with config.override(cache_dir=None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert disk_cache.folder() == tmp_path / "pbkern"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert disk_cache.folder() == tmp_path / ".cache" / "pbkern"


def test_users_without_a_home_get_one_warning(monkeypatch, capsys):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "expanduser", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    disk_cache._warn.cache_clear()
    with config.override(cache_dir=None):
        with pytest.warns(UserWarning, match="no folder for the cache") as caught:
            assert disk_cache.current() is None
            assert disk_cache.current() is None
        assert main.main(["cache", "where"]) == 2
        assert "PBKERN_CACHE_DIR" in capsys.readouterr().err
    assert len(caught) == 1


def test_the_readme_names_every_variable():
    readme = (pathlib.Path(__file__).parent.parent.parent / "README.md").read_text()
    for v in config.VARIABLES:
        assert f"`{v.name}`" in readme


def test_the_command_counts_and_clears(store, capsys):
    compiled(norm, X)
    assert main.main(["cache", "where"]) == 0
    assert capsys.readouterr().out.strip() == str(store.folder)
    assert main.main(["cache", "size"]) == 0
    assert " code" in capsys.readouterr().out
    assert main.main(["cache", "clear"]) == 0
    assert "removed" in capsys.readouterr().out
    assert store.size() == 0
    assert main.main(["cache", "size"]) == 0
    assert "nothing" in capsys.readouterr().out


# --- objects --------------------------------------------------------------------------------------------------------


def test_objects_that_nobody_completes_are_refused(store):
    (code,) = compiled(norm, X).code.objects
    with pytest.raises(InternalError, match="which nothing defines"):
        elf_loader.Image(code, {})
    for damaged in (
        b"",
        b"\x7fELF",
        code[:64],
        code[: len(code) // 2],
        code[:18] + b"\x07" + code[19:],
    ):
        with pytest.raises(InternalError):
            elf_loader.Image(damaged, runtime_symbols())


def test_a_changed_byte_in_any_stage_changes_the_keys(tmp_path):
    """One file of each folder: what turns kernels into code is in the key of code, what makes kernels in that of choices."""
    copy = tmp_path / "pbkern"
    shutil.copytree(cache_key.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    fused = tuned_choices.fusion_sources.__wrapped__
    code, choices = cache_key.sources(copy), fused(copy)
    assert (code, choices) == (cache_key.sources(), fused())
    for folder in sorted({p.parent for p in copy.rglob("*.py")}):
        path, layer = max(folder.glob("*.py")), (*folder.relative_to(copy).parts, "top")[0]
        content = path.read_bytes()
        path.write_bytes(content + b"#")
        assert (cache_key.sources(copy) != code) is (
            layer in ("top", "core", "dsl", "lower", "targets")
        ), path
        assert (fused(copy) != choices) is (layer == "fuse"), path
        path.write_bytes(content)
