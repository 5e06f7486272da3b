"""The report as a page: values of its JSON, and the page in a headless browser, where Chromium and its driver are installed."""

import html
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.report import page
from pbkern.cli import main
from pbkern.core.errors import OptionError

selenium = pytest.importorskip("selenium")
needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="no Chromium here"
)


def block(x, w_attention, w_in, w_out):
    q = x @ w_attention
    x = x + jax.nn.softmax(q @ q.T / 8) @ q
    hidden = jax.nn.gelu(x @ w_in)
    return x + hidden @ w_out


def loss(weights, x):
    for n, of_layer in enumerate(weights):
        with jax.named_scope(f"layer_{n}"):
            x = block(x, *of_layer)
    x = jax.lax.fori_loop(0, 7, lambda _, c: jnp.tanh(c @ weights[0][0]), x)
    return (x * x).mean()


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


LAYERS = [(array(64, 64), array(64, 256), array(256, 64))] * 3


@pytest.fixture(scope="module")
def step():
    """The report of a training step: a gradient of three layers and a loop, with an operation that stays with XLA."""

    def training_step(weights, x):
        gradient = jax.grad(loss)(weights, x)
        return gradient, jnp.fft.fft(x[0]).real

    return pbkern.jit(training_step).explain(LAYERS, array(96, 64))


def values_of(document):
    """The values in a page."""
    text = re.search(
        r'<script type="application/json" id="contents">(.*?)</script>', document, re.S
    )[1]
    return json.loads(text)


# --- values


def test_ten_questions_have_their_answers_in_the_values(step):
    values = json.loads(json.dumps(step.as_dict()))
    kernels, lines = values["kernels"], values["seconds_by_line"]
    slowest_line = max(lines, key=lines.get)
    assert "(block)" in slowest_line  # which line costs most
    scopes = values["seconds_by_scope"]
    assert {"layer_0", "layer_1", "layer_2"} <= set(scopes)  # which layer costs most
    assert sum(scopes.values()) == pytest.approx(values["seconds"])
    assert 0 < values["limit_seconds"] <= values["seconds"]  # how far it is from the limit
    refused = max(values["not_fused"], key=lambda r: r["bytes"])
    assert refused["why"]  # which fusion was refused, and why
    assert refused["at"]
    assert any(kernel["launches"] == 7 for kernel in kernels)  # how often a kernel runs
    assert values["peak_at"].split(",")[0] in {
        entry["name"] for entry in values["timeline"]["entries"]
    }
    assert values["peak_bytes"] == max(e["live_bytes"] for e in values["timeline"]["entries"])
    assert {kernel["bound"] for kernel in kernels} <= {"memory", "arithmetic"}  # what bounds it
    assert values["launches"] == sum(kernel["launches"] for kernel in kernels)
    assert values["bytes_moved"] == sum(k["launches"] * k["bytes_moved"] for k in kernels)
    assert [left["operation"] for left in values["left_to_xla"]] == ["fft"]
    assert len(str(step).splitlines()) <= 60


def test_the_timeline_has_each_launch_in_order_with_its_loop(step):
    timeline = step.timeline
    runs = dict.fromkeys((kernel.name for kernel in step.kernels), 0)
    for entry in timeline.entries:
        if entry.kind.value == "kernel":
            runs[entry.name] += entry.runs
    assert runs == {kernel.name: kernel.launches for kernel in step.kernels}
    loops = [span for span in timeline.spans if span.label == "7 times"]
    assert loops
    for span in loops:
        inside = timeline.entries[span.first : span.last + 1]
        assert all(entry.runs == 7 for entry in inside)
    assert any(entry.kind.value == "xla" for entry in timeline.entries)


def test_live_bytes_of_a_chain_are_those_of_the_value_between():
    """Two products, far too large for one kernel: the first's result lives until the second has read it."""
    f = pbkern.jit(lambda x, y, z: (x @ y) @ z)
    report = f.explain(array(512, 512), array(512, 512), array(512, 512))
    assert len(report.kernels) == 2
    assert [entry.live_bytes for entry in report.timeline.entries] == [512 * 512 * 4] * 2
    assert f"most temporaries are live, {512 * 512 * 4 / 1e6:.2f} MB, at" in str(report)


def test_branches_are_said_to_be_counted():
    def f(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: jnp.tanh(x) @ x.T, x)

    report = pbkern.jit(f).explain(array(512, 512))
    assert "launch(es), as if every branch were taken;" in str(report)


def test_another_report_is_asked_for():
    with pytest.raises(OptionError, match="beside= takes a report"):
        pbkern.jit(lambda x: x + 1).explain(array(8)).html(beside="x")


def test_no_temporaries_have_no_peak():
    values = pbkern.jit(lambda x: x + 1).explain(array(8)).as_dict()
    assert (values["peak_bytes"], values["peak_at"]) == (0, "")
    assert values["seconds_by_scope"] == {}


def test_equal_kernels_are_one_kernel_of_the_page(step):
    values = values_of(step.html(stages=["kernels"]))[0]
    assert len(values["kernels"]) < len(step.kernels)
    names = [name for kernel in values["kernels"] for name in kernel["equal"]]
    assert sorted(names) == sorted(kernel.name for kernel in step.kernels)
    assert sum(kernel["seconds"] for kernel in values["kernels"]) == pytest.approx(step.seconds)
    for entry in values["timeline"]["entries"]:
        if entry["kernel"] is not None:
            assert entry["name"] in values["kernels"][entry["kernel"]]["equal"]


def test_lines_of_the_source_are_those_of_the_file(step):
    values = values_of(step.html(stages=[]))[0]
    (source,) = [s for s in values["sources"] if s["file"] == __file__]
    texts = {line["number"]: line["text"] for line in source["lines"]}
    slowest = next(line for line in values["seconds_by_line"] if line.startswith(__file__))
    assert "@" in texts[int(slowest.rpartition(":")[2])]


def test_a_file_that_is_gone_has_line_numbers_alone(tmp_path):
    path = tmp_path / "gone.py"
    path.write_text("def f(x):\n    return x * 2 + x.sum()\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.unlink()
    report = pbkern.jit(space["f"]).explain(array(8))
    (source,) = values_of(report.html(stages=[]))[0]["sources"]
    assert source == {"file": str(path), "lines": [{"number": 2, "text": ""}]}


def test_each_kernel_has_its_code(step):
    short = pbkern.jit(lambda x: jnp.exp(x).sum(0)).explain(array(64, 32))
    (kernel,) = values_of(short.html())[0]["kernels"]
    assert list(kernel["texts"]) == ["kernels", "nests", "mlir", "asm"]
    assert "@pbkern.kernel" in kernel["texts"]["kernels"]
    assert "nest [" in kernel["texts"]["nests"]
    assert "memref" in kernel["texts"]["mlir"]
    assert re.search(r"\b(push|mov|ret)", kernel["texts"]["asm"])
    with pytest.raises(OptionError, match="there is no stage `sass`"):
        short.html(stages=["sass"])


def test_a_gpu_has_its_own_code():
    f = pbkern.jit(lambda x: jnp.exp(x).sum(0), compile_options={"target": "nvgpu"})
    report = f.explain(array(64, 32))
    (kernel,) = values_of(report.html(stages=["ptx"]))[0]["kernels"]
    assert ".visible .entry" in kernel["texts"]["ptx"]


def test_notebooks_show_the_page_without_code(step):
    fragment = step._repr_html_()
    document = html.unescape(re.search(r'srcdoc="(.*?)" style', fragment, re.S)[1])
    assert all(list(kernel["texts"]) == ["kernels"] for kernel in values_of(document)[0]["kernels"])


def test_texts_cannot_end_the_script():
    document = page.page([{"name": "</script><b>&"}])
    assert document.count("</script>") == 2
    assert values_of(document) == [{"name": "</script><b>&"}]
    assert "<title>&lt;/script&gt;" in document


def test_from_the_shell(tmp_path, capsys):
    model, target = tmp_path / "model.py", tmp_path / "report.html"
    model.write_text(
        "import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x).sum(0)\ndef g(x):\n    return x + 1\n"
    )
    given = [f"{model}:f", "--args", "f32[40,50]", "--html", str(target)]
    assert main.main(["explain", *given]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert [report["name"] for report in values_of(target.read_text())] == ["f"]
    assert main.main(["explain", *given, "--beside", f"{model}:g"]) == 0
    assert [report["name"] for report in values_of(target.read_text())] == ["f", "g"]
    capsys.readouterr()
    for wrong, message in (
        ([*given[:-2], "--beside", f"{model}:g"], "--beside needs a page"),
        ([*given, "--json"], "--html and --json exclude each other"),
        ([*given[:-1], str(tmp_path)], "cannot be written"),
    ):
        assert main.main(["explain", *wrong]) == 2
        assert message in capsys.readouterr().err


# --- the page


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Opened:
    """A page in the browser: nothing on its console, nothing loaded but itself, nothing wider than the window."""

    def __init__(self, driver, path, width=1200, dark=False):
        self.driver = driver
        self.scheme("dark" if dark else "light")
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.get_log("performance")
        driver.get(path.as_uri())
        requests = [
            message["params"]["request"]["url"]
            for entry in driver.get_log("performance")
            if (message := json.loads(entry["message"])["message"])["method"]
            == "Network.requestWillBeSent"
        ]
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
        assert self.script("return document.documentElement.scrollWidth") <= width
        self.check_console()

    def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def check_console(self):
        assert self.driver.get_log("browser") == []

    def script(self, text, *arguments):
        return self.driver.execute_script(text, *arguments)

    def click(self, selector):
        """Clicks on the first element, as JavaScript does; pictures of SVG too."""
        self.script(
            "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))",
            selector,
        )
        self.check_console()

    def chosen(self):
        """(numbers of kernels, lines) that are marked, by section."""
        return self.script(
            """const marks = {};
            for (const section of document.querySelectorAll("section")) {
              const nodes = [...section.querySelectorAll(".chosen")];
              if (nodes.length) marks[section.className] = 
                [...new Set(nodes.map((n) => n.dataset.kernel ?? n.dataset.line))].sort();
            }
            return marks;"""
        )

    def text(self):
        return self.script("return document.body.innerText")


@pytest.fixture(scope="module")
def page_of_step(step, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "step.html"
    path.write_text(step.html(stages=["kernels", "nests"]), encoding="utf-8")
    return path


@needs_chromium
@pytest.mark.parametrize("width", [400, 800, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_at_any_width_in_both_schemes(browser, page_of_step, width, dark):
    opened = Opened(browser, page_of_step, width, dark)
    paper = opened.script("return getComputedStyle(document.body).backgroundColor")
    brightness = np.mean([int(part) for part in re.findall(r"\d+", paper)[:3]])
    assert (brightness < 80) == dark


@needs_chromium
def test_choosing_in_one_place_chooses_everywhere(browser, page_of_step):
    opened = Opened(browser, page_of_step)
    values = values_of(page_of_step.read_text())[0]
    number = next(n for n, kernel in enumerate(values["kernels"]) if kernel["flops"])
    lines = sorted(values["kernels"][number]["lines"])
    expected = {
        "timeline": [str(number)], "source": lines, "kernels": [str(number)], "roofline": [str(number)],
    }  # fmt: skip
    for place in ("timeline", "kernels tr", "roofline circle"):
        section, _, tag = place.partition(" ")
        opened.click(f".source li[data-line='{lines[0]}'] button")
        button = " button" if tag == "tr" else ""
        opened.click(f".{section} {tag or 'button'}[data-kernel='{number}']{button}")
        assert opened.chosen() == expected
        name = values["kernels"][number]["name"]
        assert f"def {name}(" in opened.script("return document.querySelector('pre').textContent")
    opened.click(f".source li[data-line='{lines[0]}'] button")
    with_line = sorted(
        str(n) for n, kernel in enumerate(values["kernels"]) if lines[0] in kernel["lines"]
    )
    assert opened.chosen()["kernels"] == with_line
    assert opened.chosen()["source"] == [lines[0]]


@needs_chromium
def test_tabs_show_the_forms_of_a_kernel(browser, page_of_step):
    opened = Opened(browser, page_of_step)
    opened.click(".kernels tr[data-kernel] button")
    opened.click(".tabs button:nth-child(2)")
    assert "nest [" in opened.script("return document.querySelector('pre').textContent")
    opened.click(
        ".kernels tr[data-kernel]:nth-child(2) button"
    )  # the next kernel, in the same form
    assert "nest [" in opened.script("return document.querySelector('pre').textContent")
    assert (
        opened.script("return document.querySelector('[role=tab][aria-selected=true]').textContent")
        == "nests"
    )


@needs_chromium
def test_the_first_page_answers_what_the_values_do(browser, page_of_step, step):
    text = Opened(browser, page_of_step).text()
    values = step.as_dict()
    for answer in (
        "layer_1",
        values["peak_at"].split(",")[0],
        "7 times",
        "fft at",
        "peak of temporaries",
    ):
        assert answer in text
    share = f"{100 * values['limit_seconds'] / values['seconds']:.0f} %"
    assert share in text


@needs_chromium
def test_two_reports_are_beside_each_other(browser, step, tmp_path):
    path = tmp_path / "two.html"
    small = pbkern.jit(lambda x: x * 2).explain(array(64, 64))
    path.write_text(step.html(beside=small, stages=["kernels"]), encoding="utf-8")
    opened = Opened(browser, path)
    left, right = opened.script(
        "return [...document.querySelectorAll('.report')].map((r) => r.getBoundingClientRect().left)"
    )
    assert left < right
    ratio = f"{small.seconds / step.seconds:.2f}"
    assert ratio in opened.script("return document.querySelector('.comparison').innerText")
    Opened(browser, path, width=400)


@needs_chromium
@pytest.mark.parametrize("count", [0, 1, 200])
def test_from_no_kernel_to_many(browser, tmp_path, count):
    def chain(x, w):
        for n in range(count):
            x = (x @ w) * (n + 1)
        return x

    report = pbkern.jit(chain).explain(array(128, 128), array(128, 128))
    assert len(report.kernels) == count
    path = tmp_path / "chain.html"
    path.write_text(report.html(stages=["kernels"]), encoding="utf-8")
    opened = Opened(browser, path, width=400)
    bars = opened.script("return document.querySelectorAll('.track button').length")
    assert bars == count
