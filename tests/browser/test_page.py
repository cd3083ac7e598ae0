"""The page in a real browser: what a reader does, what a hostile vocabulary tries, and what the file may cost."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ov_circuits.report.cards import NO_CARD
from ov_circuits.report.dashboard import Dashboard

from .made_up import NASTY_TOKENS, SHAPES, make_payload

pytestmark = pytest.mark.browser

HEADS = 24  # of the small page: 4 layers x 6 heads


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Pages by the arguments of `make_payload`, each written once."""
    folder, made = tmp_path_factory.mktemp("pages"), {}

    def page_of(**arguments: Any) -> Path:
        key = repr(sorted(arguments.items()))
        if key not in made:
            made[key] = folder / f"{len(made)}.html"
            made[key].write_text(Dashboard(make_payload(**arguments)).html, "utf-8", newline="")
        return made[key]

    return page_of


class Tab:
    """One open page, and everything it complained about or asked the network for."""

    def __init__(self, browser: Any, *, width: int = 1400, scheme: str = "light", scripts: bool = True) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(f"{message.type}: {message.text}")
                if message.type in ("error", "warning")
                else None
            ),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("data:", "blob:", "file:")) else self.requests.append(request.url)
            ),
        )

    def open(self, path: Path, address: str = "") -> Any:
        self.page.goto(path.as_uri() + address)
        self.page.wait_for_selector("html[data-ready]")
        return self.page


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def new(**arguments: Any) -> Tab:
        opened.append(Tab(browser, **arguments))
        return opened[-1]

    yield new
    # Before closing, which aborts whatever block the page is still inflating.
    found = [(list(one.complaints), list(one.requests)) for one in opened]
    for one in opened:
        one.context.close()
    assert found == [([], [])] * len(opened)


def wait_for_heading(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('h2')?.textContent === text", arg=text)


def shown_heads(page: Any) -> int:
    return page.locator(".map-panel .cell:not(.dim)").count()


def test_atlas_has_every_head_and_its_charts(tab, pages):
    page = tab().open(pages())
    assert page.locator(".map-panel .cell").count() == HEADS
    page.wait_for_selector(".scatter-panel .chart.drawn")
    assert page.locator(".scatter-panel .point").count() == HEADS
    assert page.locator(".modebar, .modebar-btn").count() == 0
    page.select_option("#score", "frobenius_norm")
    assert "Frobenius norm" in page.locator(".map-panel .cell").first.get_attribute("aria-label")
    assert "Frobenius norm of OV: what it is" in page.inner_text(".score-note")


def test_hover_and_focus_tell_values(tab, pages):
    page = tab().open(pages())
    page.hover(".map-panel .cell >> nth=8")
    tip = page.inner_text(".tooltip")
    assert "Head 1.2" in tip and "Eigenvalue copying, vocabulary space" in tip and f"of {HEADS}" in tip
    page.mouse.move(1, 1)
    assert page.locator(".tooltip").is_hidden()


def test_the_atlas_tells_what_a_head_reads_and_writes(tab, pages):
    words = [" in", " the", " house", " cat"]
    page = tab().open(pages(tokens=words, sets=False))
    page.wait_for_selector("table.heads td.ends .token")
    made = make_payload(tokens=words, sets=False)
    direction = made["cards"][8]["directions"][0]
    ends = [
        [made["tokens"][token].replace(" ", "·") for token, _ in direction[side][end][:3]]
        for end in ("plus", "minus")
        for side in ("reads", "writes")
    ]
    row = page.locator("table.heads tbody tr", has=page.locator("a[href='#1.2']"))
    page.hover(".map-panel .cell >> nth=8")
    for place in (row, page.locator(".tooltip")):
        sides = place.locator(".side")
        assert [sides.nth(k).locator(".token").all_text_contents() for k in range(4)] == ends


def test_what_is_equal_in_all_heads_has_no_rank(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2)
    payload["values"]["frobenius_norm"] = [1.5] * 4
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path, "#0.1")
    page.wait_for_selector("table.scores")
    assert "all equal" in page.inner_text("table.scores tr:has-text('Frobenius norm of OV')")


def test_keyboard_moves_opens_and_leaves(tab, pages):
    page = tab().open(pages())
    page.focus(".map-panel .cell >> nth=0")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Head 1.2")
    assert page.locator(".map-panel .cell[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    wait_for_heading(page, "Head 1.2")
    assert page.url.endswith("#1.2")
    page.keyboard.press("Escape")
    page.wait_for_selector(".atlas")


def test_click_deep_link_and_back(tab, pages):
    page = tab().open(pages())
    page.click(".map-panel .cell >> nth=8")
    page.wait_for_selector(".directions")
    assert page.url.endswith("#1.2")
    page.click("a[rel=next]")
    wait_for_heading(page, "Head 1.3")
    page.go_back()
    wait_for_heading(page, "Head 1.2")
    page.go_back()
    page.wait_for_selector(".atlas")

    page = tab().open(pages(), "#3.5")
    assert page.inner_text("h2") == "Head 3.5"
    assert page.title().startswith("Head 3.5")


@pytest.mark.parametrize("address", ["99.1", "%", "%E0%A4", "compare/0.1,99.1", "compare/", "paths/9.9", "constructor"])
def test_an_address_of_nothing_leads_to_the_atlas_and_says_so(tab, pages, address):
    page = tab().open(pages(), f"#{address}")
    assert "no head or view" in page.inner_text("[role=alert]")
    assert page.locator(".map-panel .cell").count() == HEADS
    page.click(".map-panel .cell >> nth=8")
    wait_for_heading(page, "Head 1.2")
    page.evaluate("address => { location.hash = address }", address)
    page.wait_for_selector(".atlas")


def test_back_leads_to_the_place_that_was_left(tab, pages):
    page = tab().open(pages(), "#prompt")
    link = page.locator(".received tbody a").last
    link.focus()
    left = page.evaluate("scrollY")
    assert left > 900
    label = link.inner_text()
    page.keyboard.press("Enter")
    wait_for_heading(page, f"Head {label}")
    assert page.evaluate("scrollY") < 300
    page.go_back()
    page.wait_for_selector(".received tbody a")
    assert page.evaluate("scrollY") == left
    page.go_forward()
    wait_for_heading(page, f"Head {label}")
    assert page.evaluate("scrollY") < 300


@pytest.mark.parametrize("way", ["Escape", "back", "link"])
def test_the_keyboard_is_back_on_the_head_that_it_left(tab, pages, way):
    page = tab().open(pages())
    page.focus(".map-panel .cell >> nth=0")
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    wait_for_heading(page, "Head 1.1")
    if way == "Escape":
        page.keyboard.press("Escape")
    elif way == "back":
        page.go_back()
    else:
        page.focus("text=← Atlas")
        page.keyboard.press("Enter")
    page.wait_for_selector(".atlas")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Head 1.1")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Head 1.2")
    assert page.locator(".map-panel .cell[tabindex='0']").count() == 1


FILTERS = [
    ("layer >= 2", lambda v, layer, head: layer >= 2),
    ("eigen_copying_ov > 0.1 and layer > 0", lambda v, layer, head: v > 0.1 and layer > 0),
    ("not (head < 2 or head == 5)", lambda v, layer, head: not (head < 2 or head == 5)),
    ("-0.3 < eigen_copying_ov <= .3", lambda v, layer, head: -0.3 < v <= 0.3),
    ("abs(eigen_copying_ov) ≥ 0.3 && head != 0", lambda v, layer, head: abs(v) >= 0.3 and head != 0),
    ("layer > 1 or head = 0 and layer < 1", lambda v, layer, head: layer > 1 or (head == 0 and layer < 1)),
]

WRONG_FILTERS = [
    ("copyng > 1", "no score “copyng”"),
    ("layer >", "missing before the end"),
    ("(layer > 1", "not closed"),
    ("layer > 1 layer", "join parts with and, or"),
    ("layer", "write a comparison"),
    ("layer > 1; alert(1)", "not part of a filter"),
    ("layer > (head > 1)", "both sides"),
    ("constructor > 0", "no score “constructor”"),
]


def test_filter(tab, pages):
    page = tab().open(pages())
    values = make_payload()["values"]["eigen_copying_ov"]
    for text, expected in FILTERS:
        wanted = sum(expected(v, i // 6, i % 6) for i, v in enumerate(values))
        assert 0 < wanted < HEADS
        page.fill("#filter", text)
        assert page.inner_text("#filter-message") == ""
        assert shown_heads(page) == wanted, text
        assert page.locator("table.heads tbody tr").count() == wanted
        assert f"{wanted} of {HEADS} heads" in page.inner_text(".left")
    for text, says in WRONG_FILTERS:
        page.fill("#filter", text)
        assert says in page.inner_text("#filter-message"), text
        assert page.get_attribute("#filter", "aria-invalid") == "true"
        assert shown_heads(page) == HEADS
    # A part of several names: the first is taken, and said.
    page.fill("#filter", "copying > 0.1 and layer > 0")
    assert page.inner_text("#filter-message").startswith("“copying” is taken for eigen_copying_ov; eigen_copying_full,")
    assert shown_heads(page) == sum(v > 0.1 and i >= 6 for i, v in enumerate(values))
    # A head that does not have the score satisfies no comparison.
    page.fill("#filter", "composition_k_z > -1000 or composition_k_z < -1000")
    assert shown_heads(page) == HEADS - 1


def test_a_filter_asks_for_a_scores_z(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2)
    payload["chance"] = {"eigen_copying_ov": {"note": "", "mean": [0.0] * 4, "z": [-2.0, 4.0, None, 5.0]}}
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path)
    for text, wanted in (
        ("eigen_copying_ov_z > 3", 2),
        ("COPYING_Z < 4.5 and LAYER == 0", 2),
        ("not copying_z > 3", 2),
        ("ov_z < 5", 2),
    ):
        page.fill("#filter", text)
        assert page.inner_text("#filter-message") == ""
        assert shown_heads(page) == wanted, text
    page.fill("#filter", "frobenius_norm_z > 3")
    assert "no score “frobenius_norm_z”" in page.inner_text("#filter-message")


def test_the_search_finds_a_pair_that_the_file_was_made_for(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2, tokens=[" in", " the"])
    common = {"group": "Token pairs", "range": None, "source": "", "note": ""}
    entry = {"key": "entry_1", "label": "Entry", "diverging": True, "pair": [" France", " <b>Paris"]}
    payload["scores"] += [common | entry, common | {"key": "entry_1_rank", "label": "Rank", "diverging": False}]
    payload["values"] |= {"entry_1": [0.5, 9.0, 7.25, None], "entry_1_rank": [99.0, 1203.0, 6.0, None]}
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path)
    for reads, writes in (('" France"', "paris"), ("france", ""), ("", "·<b>Par")):
        page.fill("#search-reads", reads)
        page.fill("#search-writes", writes)
        page.wait_for_function("document.querySelectorAll('.hits li').length === 2")
        assert page.inner_text(".hits li >> nth=0") == "1.0 reads ·France and writes ·<b>Paris entry +7.25, rank 6"
        assert page.inner_text(".hits li >> nth=1").endswith("entry +0.50, rank 99")
        assert shown_heads(page) == 2
    payload["values"]["entry_1_rank"] = [300.0, 1203.0, 200.0, None]
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path)
    page.fill("#search-reads", "France")
    page.wait_for_selector(".hits")
    assert page.locator(".hits li").all_inner_texts() == [
        "1.0 reads ·France and writes ·<b>Paris entry +7.25, rank 200"
    ]
    page.fill("#search-reads", "Spain")
    page.wait_for_function("document.querySelector('.results').textContent.includes('No direction')")


def test_sorting(tab, pages):
    page = tab().open(pages())
    values = make_payload()["values"]["frobenius_norm"]
    best = max(range(HEADS), key=values.__getitem__)
    page.click("table.heads th button:has-text('Frobenius norm')")
    first = page.inner_text("table.heads tbody tr >> nth=0 >> th")
    assert first == f"{best // 6}.{best % 6}"
    page.click("table.heads th button:has-text('Frobenius norm')")
    assert page.inner_text("table.heads tbody tr >> nth=-1 >> th") == first
    assert page.get_attribute("table.heads th[aria-sort]", "aria-sort") == "ascending"


def test_token_search(tab, pages):
    payload = make_payload()

    def heads(test: Callable[[set[str], set[str]], bool]) -> set[int]:
        words = payload["tokens"]
        ends = [
            (i, *({words[t] for t, _ in d[side][end]} for side in ("reads", "writes")))
            for i, card in enumerate(payload["cards"])
            for d in card["directions"]
            for end in ("plus", "minus")
        ]
        pairs = [
            (i, {words[source]}, {words[output]})
            for i, card in enumerate(payload["cards"])
            for source, output, _ in (card["pairs"] or {"positive": []})["positive"]
        ]
        return {i for i, reads, writes in [*ends, *pairs] if test(reads, writes)}

    page = tab().open(pages())
    page.fill("#search-reads", '" Paris"')
    page.wait_for_selector(".hits")
    assert shown_heads(page) == len(heads(lambda reads, writes: " Paris" in reads))
    assert "·Paris" in page.inner_text(".hits")
    page.fill("#search-writes", "mary")
    wanted = heads(lambda reads, writes: " Paris" in reads and " Mary" in writes)
    page.wait_for_function("n => document.querySelectorAll('.map-panel .cell:not(.dim)').length === n", arg=len(wanted))
    # A head's strongest pair, found whole; pairs come first.
    source, output, value = payload["cards"][2]["pairs"]["positive"][0]
    page.fill("#search-reads", f'"{payload["tokens"][source]}"')
    page.fill("#search-writes", f'"{payload["tokens"][output]}"')
    wanted = heads(lambda reads, writes: payload["tokens"][source] in reads and payload["tokens"][output] in writes)
    page.wait_for_function("n => document.querySelectorAll('.map-panel .cell:not(.dim)').length === n", arg=len(wanted))
    assert f"pair, +{value:.3g}"[:8] in page.locator(".hits li").first.inner_text()
    page.fill("#search-reads", "no such token")
    page.wait_for_function("() => document.querySelector('.results').textContent.includes('No direction')")
    page.click("text=Show all >> nth=0")
    page.wait_for_function(f"() => document.querySelectorAll('.map-panel .cell:not(.dim)').length === {HEADS}")


def test_the_search_finds_tokens_that_no_card_shows(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2)
    places = [
        [{side: {end: [0, 1] for end in ("plus", "minus")} for side in ("reads", "writes")} for _ in card["directions"]]
        for card in payload["cards"]
    ]
    places[2][1]["writes"]["minus"] = [0, 1, 2]
    places[1][3]["writes"]["plus"] = [2]
    payload["search"] = {"tokens": ["x", "y", "<i>unseen</i>"], "places": places}
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path)
    page.fill("#search-writes", "unseen")
    page.wait_for_selector(".hits li")
    assert page.locator(".hits a").all_inner_texts() == ["0.1", "1.0"], "the sooner it comes, the stronger"
    assert "writes <i>unseen</i> 1−" in page.inner_text(".hits li >> nth=1").replace("\n", " ")
    assert page.inner_text(".hits li >> nth=1").endswith("place 3")
    assert shown_heads(page) == 2


def test_box_on_the_scatter_keeps_its_heads(tab, pages):
    page = tab().open(pages())
    page.wait_for_selector(".scatter-panel .chart.drawn")
    box = page.locator(".scatter-panel .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + box["height"] - 4, steps=4)
    page.mouse.up()
    page.wait_for_function("() => document.querySelector('.left').textContent.includes(' of ')")
    assert 0 < shown_heads(page) < HEADS


def test_an_axis_of_the_scatter_may_be_the_layer(tab, pages):
    page = tab().open(pages())
    page.select_option("#score-x", label="Layer")
    page.wait_for_function("document.querySelector('.scatter-panel .xtitle')?.textContent === 'Layer'")
    x = page.evaluate("document.querySelector('.scatter-panel .chart-canvas').data[0].x")
    assert x == [i // 6 for i in range(HEADS)]
    assert page.locator("#score option", has_text="Layer").count() == 0
    assert page.locator("table.heads thead th", has_text="Layer").count() == 0
    page.locator(".scatter-panel .point").first.hover(force=True)
    assert re.match(r"Head 0\.\d\n(?!Layer)", page.inner_text(".tooltip"))


def test_comparison(tab, pages):
    page = tab().open(pages())
    page.click(".map-panel .cell >> nth=3", modifiers=["Shift"])
    page.check("input[aria-label='Compare head 1.2']")
    page.click("text=Side by side")
    page.wait_for_selector(".compare-card")
    assert page.inner_text("h2") == "Heads 0.3, 1.2"
    assert page.locator(".compare-card").count() == 2
    assert page.url.endswith("#compare/0.3,1.2")
    assert page.locator(".compare .heat canvas").count() == 2


def test_compared_heads_tell_what_they_have_to_do_with_each_other(tab, pages):
    section = make_payload()["composition"]
    sender, receiver = section["sender"][0], section["receiver"][0]
    page = tab().open(pages(), f"#compare/{shown_label(receiver)},{shown_label(sender)}")
    page.wait_for_selector(".between")
    wanted = sum(pair == (sender, receiver) for pair in zip(section["sender"], section["receiver"], strict=True))
    feeds = page.locator(".between li", has_text=f"{shown_label(sender)} feeds {shown_label(receiver)}")
    assert feeds.count() == wanted >= 1
    assert f"by {section['kind'][0]}" in feeds.first.inner_text()


def test_card(tab, pages):
    page = tab().open(pages(), "#1.2")
    page.wait_for_selector(".directions")
    page.wait_for_function("() => document.querySelectorAll('.chart.drawn').length === 5")
    card = make_payload()["cards"][8]
    assert "range of 8 draws of something <b>random</b>" in page.inner_text(".chart-row")
    assert "Its strongest direction" in page.inner_text(".evidence")
    assert page.locator(".directions .flag").count() == sum(not d["separable"] for d in card["directions"][:5])
    # Directions count from 0 wherever they are shown, as in head.reads(direction=) and ablate --direction.
    assert page.locator(".directions .index").all_inner_texts() == list("012345")
    bars = page.evaluate("document.querySelector('.chart-row .chart-canvas').data[0].x")
    assert bars == list(range(len(card["singular_values"])))
    page.locator(".chart-row .bars .point").nth(2).hover(force=True)
    page.wait_for_selector(f".tooltip:has-text('singular value 2 {card['singular_values'][2]:.2f}')")
    page.click("text=Show all 8 directions")
    assert page.locator(".directions tbody").count() == 8
    assert page.locator("table.scores .here").count() >= 9
    page.wait_for_selector(".heat canvas")
    assert page.locator(".heat canvas").count() == 2


def test_the_sentence_has_tokens_and_a_link(tab, pages):
    page = tab().open(pages(), "#1.2")
    page.wait_for_selector(".evidence")
    assert page.locator(".evidence .token").count() == 2
    page.click(".evidence a")
    wait_for_heading(page, "Head 0.0")


def test_a_card_waits_for_the_rest_of_a_slow_file(browser):
    """A large file comes in pieces, and a link to a head asks for a block that may have come by half."""
    html = Dashboard(make_payload()).html.encode()
    start = html.index(b'id="block-cards"')
    cut = (start + html.index(b"</script>", start)) // 2
    asked = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(html)))
            self.end_headers()
            self.wfile.write(html[:cut])
            asked.wait(20)
            self.wfile.write(html[cut:])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    one = Tab(browser)
    try:
        one.page.goto(f"http://127.0.0.1:{server.server_port}/#1.2", wait_until="commit")
        one.page.wait_for_selector("html[data-ready]")
        one.page.wait_for_selector("#block-cards", state="attached")
        one.page.wait_for_timeout(300)  # a page that does not wait fails in this time
        assert one.page.locator(".loading").count() == 1 and one.complaints == []
        asked.set()
        one.page.wait_for_selector(".directions")
        assert one.complaints == []
    finally:
        asked.set()
        one.context.close()
        server.shutdown()
        server.server_close()


def test_token_pairs_are_shown_or_said_to_be_missing(tab, pages):
    page = tab().open(pages(), "#1.2")
    page.wait_for_selector(".pairs")
    payload = make_payload()
    assert page.locator(".pair-columns ol").count() == 2 and page.locator(".pairs li").count() == 12
    strongest = payload["cards"][8]["pairs"]["positive"][0][2]
    assert page.inner_text(".pairs li >> nth=0 >> .num") == f"+{strongest:.2f}"
    page.evaluate("location.hash = '1.3'")
    wait_for_heading(page, "Head 1.3")
    page.wait_for_selector("code:has-text('ov-circuits pairs MODEL 1.3')")
    assert page.locator(".pairs").count() == 0


def strongest_paths(section: dict[str, Any], side: str, head: int) -> list[int]:
    """Indices of a head's paths, as the page's rows are, strongest first."""
    return [k for k, other in enumerate(section[side]) if other == head]


def test_composition_links_lead_to_the_other_head(tab, pages):
    page = tab().open(pages(), "#1.2")
    page.wait_for_selector(".link-columns")
    section = make_payload()["composition"]
    for nth, (own, other) in enumerate((("receiver", "sender"), ("sender", "receiver"))):
        wanted = strongest_paths(section, own, 8)[:6]
        assert wanted
        rows = page.locator(".link-columns table").nth(nth).locator("tbody tr")
        assert rows.count() == len(wanted)
        shown = [f"{section[other][k] // 6}.{section[other][k] % 6}{section['kind'][k]}" for k in wanted]
        assert [text.split("\t")[0] + text.split("\t")[1] for text in rows.all_inner_texts()] == shown
        flagged = [k for k in wanted if section["z_paired"][k] >= (section["fdr"][section["kind"][k]] or 1e9)]
        assert page.locator(".link-columns table").nth(nth).locator("tr.flagged").count() == len(flagged)
    page.click(".link-columns a >> nth=0")
    wait_for_heading(page, f"Head {shown_label(section['sender'][strongest_paths(section, 'receiver', 8)[0]])}")


def shown_label(head: int) -> str:
    return f"{head // 6}.{head % 6}"


def test_heads_that_share_a_space_are_linked(tab, pages):
    page = tab().open(pages(), "#1.2")
    page.wait_for_selector(".spaces")
    near = make_payload()["spaces"]["neighbours"][8]
    assert page.locator(".spaces table a").all_inner_texts() == [shown_label(row[0]) for row in near]
    assert "23" in page.inner_text(".spaces") and "15" in page.inner_text(
        ".spaces"
    )  # shares of the variance in per cent


def test_composition_view(tab, pages):
    page = tab().open(pages(), "#paths")
    page.wait_for_selector(".path-graph")
    section = make_payload()["composition"]
    z = section["z_paired"]

    def wanted(least: float, kinds: str = "QKV") -> int:
        return sum(value >= least and kind in kinds for value, kind in zip(z, section["kind"], strict=True))

    def shown() -> int:
        return page.locator(".path-graph g.path").count()

    set_least = (
        "v => { const s = document.getElementById('path-least'); s.value = v; s.dispatchEvent(new Event('input')); }"
    )
    for least in (6, 4, 9.5):
        page.evaluate(set_least, least)
        assert shown() == wanted(least)
        assert page.locator(".path-list tbody tr").count() == min(60, wanted(least))
    page.evaluate(set_least, 4)
    page.uncheck(".kinds input >> nth=0")
    assert shown() == wanted(4, "KV")
    page.check(".kinds input >> nth=0")
    page.click("text=false discovery rate")
    assert shown() == wanted(4.5)
    page.evaluate(set_least, 0.5)
    assert "each head’s five strongest Q, K, V" in page.inner_text(".paths-body [role=status]")
    page.evaluate(set_least, 6)
    page.hover(".path-graph .node >> nth=0")
    assert "of the paths shown" in page.inner_text(".tooltip")
    assert page.locator(".path-graph.tracing .lit").count() > 0
    label = page.locator(".path-graph .node >> nth=0").text_content()
    page.click(".path-graph .node >> nth=0")
    wait_for_heading(page, f"Head {label}")


def test_composition_view_of_one_head_by_its_address_and_by_keyboard(tab, pages):
    page = tab().open(pages(), "#paths/1.2")
    page.wait_for_selector(".path-graph")
    section = make_payload()["composition"]
    own = [k for k in range(len(section["kind"])) if 8 in (section["sender"][k], section["receiver"][k])]
    assert page.locator(".path-graph g.path").count() == len(own)
    assert page.locator("#path-least").count() == 0
    page.focus(".path-list a >> nth=0")
    label = page.inner_text(".path-list a >> nth=0")
    page.keyboard.press("Enter")
    wait_for_heading(page, f"Head {label}")
    page.go_back()
    wait_for_heading(page, "Composition")
    page.select_option("#path-head", "")
    page.wait_for_selector("#path-least")
    assert page.url.endswith("#paths")


def test_a_page_without_paths_offers_none(tab, tmp_path):
    payload = make_payload(prompt=False)
    payload["composition"], payload["spaces"]["neighbours"] = None, None
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path, "#1.2")
    page.wait_for_selector(".directions")
    assert page.locator(".link-columns").count() == 0 and page.locator("a[href='#paths']").count() == 0
    page.evaluate("location.hash = 'paths'")
    page.wait_for_selector("[role=alert]")


def test_prompt_view_closes_the_account(tab, pages):
    page = tab().open(pages(), "#prompt")
    page.wait_for_selector(".account")
    text = page.inner_text(".prompt")
    assert "beginning-of-text token was put in front" in text
    assert "Residual" in text and "2.1 × 10⁻⁶" in text
    assert page.locator(".account tbody tr").count() == 7
    page.click("text=By layer")
    assert page.locator(".account tbody tr").count() == len(make_payload()["prompt"]["components"])
    assert page.locator(".prompt-strip li:not(.break)").count() == 18
    assert page.locator(".prompt .cell").count() == HEADS
    # Attribution of a head is the sum over its source tokens: the map and the strip tell one story.
    page.select_option("#prompt-head", "5")
    page.wait_for_selector("text=All of head 0.5")


def test_a_source_token_is_decomposed_by_head(tab, pages):
    page = tab().open(pages(), "#prompt")
    page.click(".prompt-strip .token-button >> nth=4")
    page.wait_for_selector(".prompt-columns .lead:has-text('at position 4')")
    spec = make_payload()["prompt"]["head_source"]
    source = np.frombuffer(base64.b64decode(spec["data"]), "<f4").reshape(spec["shape"])[:, 4]
    best = int(source.argmax())
    assert page.inner_text(".ranking a >> nth=0") == f"{best // 6}.{best % 6}"
    label = page.get_attribute(f".prompt .cell >> nth={best}", "aria-label")
    assert "from ·John, position 4" in label
    page.click("text=All tokens")
    page.wait_for_selector(".prompt-columns .lead:has-text('from its source tokens')")


@pytest.mark.parametrize("scale", [1.0, -3e-3, -3e-5])
def test_bars_of_small_numbers_keep_their_sign(tab, tmp_path, scale):
    payload = make_payload()
    source = payload["prompt"]["head_source"]
    numbers = np.frombuffer(base64.b64decode(source["data"]), "<f4") * scale
    source["data"] = base64.b64encode(numbers.astype("<f4").tobytes()).decode()
    (tmp_path / "small.html").write_text(Dashboard(payload).html, "utf-8", newline="")
    page = tab().open(tmp_path / "small.html", "#prompt")
    page.wait_for_selector(".bar-axis span")
    cut = """labels => labels.filter(label =>
        label.getBoundingClientRect().left < label.closest('.scroll').getBoundingClientRect().left
    ).map(label => label.textContent)"""
    assert page.locator(".bar-axis span").evaluate_all(cut) == []


def test_the_patterns_of_a_layer_stand_side_by_side(tab, pages):
    page = tab().open(pages(), "#prompt")
    page.wait_for_selector(".pattern")
    values = np.abs(make_payload()["prompt"]["head_value"])
    best = int(values.argmax())
    assert page.locator(".pattern > span").all_inner_texts()[best % 6].endswith(shown_label(best))
    assert page.get_attribute(f".pattern[data-key='{best}']", "aria-pressed") == "true"
    other = best - best % 6 + (best + 1) % 6
    page.click(f".pattern[data-key='{other}']")
    page.wait_for_selector(f".pattern[data-key='{other}'][aria-pressed=true]")
    assert page.input_value("#prompt-head") == str(other)
    page.wait_for_selector(f"canvas[aria-label='Attention pattern of head {shown_label(other)}']")
    # Another layer opens at the head that moves the answer most there.
    layer = (best // 6 + 1) % 4
    page.select_option("#prompt-layer", str(layer))
    strongest = layer * 6 + int(values[layer * 6 : layer * 6 + 6].argmax())
    page.wait_for_selector(f".pattern[data-key='{strongest}'][aria-pressed=true]")
    assert page.locator(".pattern").count() == 6


def test_a_card_is_drawn_anew_in_the_other_theme(tab, pages):
    page = tab().open(pages(), "#1.2")
    corner = """() => [...document.querySelector('.heat canvas').getContext('2d').getImageData(0, 0, 1, 1).data]"""
    page.wait_for_selector(".heat canvas")
    light = page.evaluate(corner)
    page.evaluate("document.querySelector('.heat canvas').dataset.old = 1")
    page.click("#theme")
    page.wait_for_selector(".heat canvas:not([data-old])")
    dark = page.evaluate(corner)
    assert sum(light[:3]) < sum(dark[:3]), "full attention is dark on a light page, light on a dark one"


def test_ablation_stands_beside_attribution(tab, pages):
    page = tab().open(pages(), "#prompt")
    page.wait_for_selector(".ablation .chart.drawn")
    assert page.locator(".ablation .point").count() == HEADS // 2
    ablation = make_payload()["prompt"]["ablation"]
    largest = ablation["head"][int(np.abs(ablation["total_effect"]).argmax())]
    first = ".effects tbody tr >> nth=0"
    assert page.inner_text(f"{first} >> th") == f"{largest // 6}.{largest % 6}"
    rows = {name: page.inner_text(f"{first} >> td >> nth={k}") for k, name in enumerate(("direct", "total", "rest"))}
    numbers = {name: float(text.replace("−", "-")) for name, text in rows.items()}
    assert numbers["rest"] == pytest.approx(numbers["total"] - numbers["direct"], abs=0.011)
    page.click(".effects button:has-text('Loss')")
    largest = ablation["head"][int(np.abs(ablation["answer_loss_change"]).argmax())]
    assert page.inner_text(f"{first} >> th") == f"{largest // 6}.{largest % 6}"


@pytest.mark.parametrize(
    ("total", "says"),
    [(1.5, "later parts add 0.50"), (0.4, "later parts make up for 0.60"), (-0.4, "later parts make up for 1.40")],
)
def test_what_goes_against_a_heads_own_part_makes_up_for_it(tab, tmp_path, total, says):
    payload = make_payload(n_layers=2, n_heads=2)
    ablation = payload["prompt"]["ablation"]
    for name, value in (("direct_effect", 1.0), ("total_effect", total)):
        ablation[name] = [value] * len(ablation["head"])
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path, "#prompt")
    page.wait_for_selector(".ablation .chart.drawn")
    page.locator(".ablation .point").last.hover(force=True)
    page.wait_for_selector(".tooltip:visible")
    assert says[:-1] in page.inner_text(".tooltip")


def test_a_destination_token_is_decomposed_by_head_and_source(tab, pages):
    page = tab().open(pages(), "#prompt")
    page.click("section:has(> h3:has-text('What a token receives')) .token-button >> nth=3")
    page.wait_for_function("document.querySelectorAll('.received thead .token-column').length === 4")
    spec = make_payload()["prompt"]["value_weighted"]
    moved = np.frombuffer(base64.b64decode(spec["data"]), "<f2").reshape(spec["shape"])[:, 3, :4].astype(float)
    order = moved.sum(1).argsort()[::-1]
    labels = page.locator(".received tbody th").all_inner_texts()
    assert labels == [f"{i // 6}.{i % 6}" for i in order[:18]]
    assert float(page.inner_text(".received tbody td >> nth=2")) == pytest.approx(moved[order[0], 2], abs=0.06)


PLACES = {0: "the destination itself", None: "before the text"}
PARTS = {1.0: "1.00", -0.25: "−0.25", 0.004: "0.004", 0.5: "0.50", 0.1: "0.10"}


def test_a_card_shows_a_texts_examples(tab, pages):
    page = tab().open(pages(tokens=[" in", " the", " house", " cat"], sets=False), "#1.2")
    page.wait_for_selector(".examples > li")
    made = make_payload(tokens=[" in", " the", " house", " cat"], sets=False)["examples"]["heads"]["1.2"]["examples"]
    lines = page.locator(".examples > li")
    assert lines.count() == 3
    for k, example in enumerate(made[:3]):
        text = page.locator(".examples > li").nth(k).locator(".example-text > .prose")
        assert text.text_content() == example["before"] + example["destination"] + example["after"]
        assert text.locator("mark.destination").text_content() == example["destination"]
    assert lines.nth(2).locator(".example-source mark.source").text_content() == made[2]["source"]
    assert "50 back" in lines.nth(2).inner_text()
    for k, example in enumerate(made[:3]):
        # Where the source that has most of the value is not among those attended to most, it stands behind them.
        attended = example["attended"] if k < 2 else [*example["attended"], [example["source"], 0.4, 1.0, 50]]
        chips = lines.nth(k).locator(".attended li")
        assert chips.locator(".token").all_text_contents() == [text.replace(" ", "·") for text, *_ in attended]
        shown = [line.rsplit(None, 2)[-2:] for line in chips.locator(".num").all_text_contents()]
        assert shown == [[f"{100 * a:.0f}", "%"] for _, a, *_ in attended] + ([["25", "%"]] if k < 2 else [])
        assert ("elsewhere" in lines.nth(k).inner_text()) == (k < 2)
        parts = chips.locator(".visually-hidden").all_text_contents()
        assert parts == [f", {PLACES.get(back, f'{back} back')}, part {PARTS[part]}" for _, _, part, back in attended]
        assert lines.nth(k).locator(".attended .source .token").text_content() == example["source"].replace(" ", "·")
    tints = [
        lines.nth(0).locator(".attended .token").nth(n).evaluate("chip => getComputedStyle(chip).backgroundColor")
        for n in range(3)
    ]
    assert len(set(tints)) == 3  # by attention
    page.click("#theme")
    assert tints[0] != lines.nth(0).locator(".attended .token").nth(0).evaluate(
        "chip => getComputedStyle(chip).backgroundColor"
    )
    page.click("text=By tenths of the write")
    assert lines.count() == 10
    assert "+0.0123 ± 0.0004" in page.inner_text(".means")


def test_a_prompt_set_has_means_with_intervals_by_role(tab, pages):
    page = tab().open(pages(), "#set")
    page.wait_for_selector(".whiskers")
    made = make_payload()["prompt_set"]
    for name, values in (("All", made["heads"]), ("subject", made["roles"]["subject"])):
        page.click(f".segmented button:has-text('{name}')")
        order = np.abs(values["mean"]).argsort()[::-1]
        row = page.locator(".whiskers tbody tr").first
        assert row.locator("th").inner_text() == f"{order[0] // 6}.{order[0] % 6}"
        ends = [float(t.replace("−", "-")) for t in row.locator(".interval").inner_text().split(" to ")]
        assert ends == pytest.approx([values["low"][order[0]], values["high"][order[0]]], abs=0.006)
        assert row.locator(".whisker").count() == 1
    assert "2 whose answer is <several> tokens" in page.inner_text(".prompt > header")


def test_a_deep_models_other_components_are_folded(tab, tmp_path):
    payload = make_payload()
    rows = [{"name": f"MLP {k}", "mean": 0.01 * (k if k % 2 else -k), "low": -0.1, "high": 0.2} for k in range(20)]
    payload["prompt_set"]["others"] = rows
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path, "#set")
    page.wait_for_selector(".set-others .whiskers")
    shown = page.locator(".set-others tbody th").all_text_contents()
    assert shown == [*(f"MLP {k}" for k in range(10, 20)), "The other 10"]
    assert page.inner_text(".set-others tbody tr >> nth=-1 >> .num >> nth=0") == "+0.050"
    page.click(".set-others button")
    assert page.locator(".set-others tbody th").all_text_contents() == [row["name"] for row in rows]
    page.click(".set-others button")
    assert page.locator(".set-others tbody tr").count() == 11


def test_a_continuation_goes_step_by_step(tab, pages):
    page = tab().open(pages(), "#generation/3")
    page.wait_for_selector(".steps tr.chosen")
    made = make_payload()["generation"]
    assert page.locator(".steps tbody tr").count() == len(made["steps"]) == 5
    assert page.inner_text(".steps tr.chosen th") == "3"
    page.click(".token-button >> nth=0")
    page.wait_for_function("document.querySelector('.steps tr.chosen th')?.textContent === '1'")
    assert page.url.endswith("#generation/1")
    values = np.frombuffer(base64.b64decode(made["head_value"]["data"]), "<f4").reshape(made["head_value"]["shape"])[0]
    best = int(np.abs(values).argmax())
    assert page.inner_text(".view-body .ranking a >> nth=0") == f"{best // 6}.{best % 6}"
    # What stands after the position that predicts has no part in the step.
    assert page.locator(".token-strip .token.tinted").count() == made["start"]
    page.go_back()
    page.wait_for_function("document.querySelector('.steps tr.chosen th')?.textContent === '3'")


def test_head_that_is_not_finite_says_so(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2)
    payload["cards"][1] = {**NO_CARD, "evidence": []}
    for values in payload["values"].values():
        values[1] = None
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path, "#0.1")
    page.wait_for_selector(".absent")
    assert "NaN or infinity" in page.inner_text(".card-body")
    page.evaluate("location.hash = 'compare/0.1,0.0'")
    page.wait_for_selector(".compare-card >> nth=1")


def test_prompt_without_an_answer_shows_patterns_only(tab, pages):
    page = tab().open(pages(prompt="patterns"), "#prompt")
    page.wait_for_selector(".heat canvas")
    assert page.locator(".account").count() == 0
    assert "Attribution" not in page.inner_text("main")


def test_checkpoint_without_embeddings_says_so(tab, pages):
    page = tab().open(pages(prompt=False, embeddings=False), "#0.0")
    page.wait_for_selector(".absent")
    assert "holds no embeddings" in page.inner_text(".card-body")
    assert page.locator("a[href='#prompt']").count() == 0


def test_grouped_heads_are_shown_as_groups(tab, pages):
    page = tab().open(pages(n_heads=6, n_kv_heads=2))
    assert page.locator(".kv").count() == 2
    page.hover(".map-panel .cell >> nth=1")
    assert page.locator(".cell.shares").count() == 3
    page.click(".map-panel .cell >> nth=4")
    wait_for_heading(page, "Head 0.4")
    assert "key/value head 1, shared with 0.3, 0.5" in page.inner_text(".card-head")
    page.click("text=the group side by side")
    wait_for_heading(page, "Heads 0.3, 0.4, 0.5")
    page.wait_for_selector(".compare-card >> nth=2")


def test_hostile_vocabulary_stays_text(tab, pages):
    page = tab().open(pages())
    scripts = pages().read_text("utf-8").count("</script>")
    page.wait_for_selector(".scatter-panel .chart.drawn")
    seen = set()
    for head in range(8):
        page.evaluate("head => { location.hash = head }", f"{head // 6}.{head % 6}")
        page.wait_for_function(
            "title => document.querySelector('h2')?.textContent === title && document.querySelector('.directions')",
            arg=f"Head {head // 6}.{head % 6}",
        )
        seen |= set(page.locator(":is(.directions, .pairs, .evidence) .token").all_text_contents())
        page.wait_for_selector(".examples mark")
    for view, part in (
        ("paths", ".path-graph"),
        ("prompt", ".received td >> nth=0"),
        ("set", ".set-prompt"),
        ("generation/2", ".token-strip"),
        ("compare/0.3,1.2", ".compare-card"),
    ):
        page.evaluate("view => { location.hash = view }", view)
        page.wait_for_selector(part)
    assert page.evaluate("window.xss") is None
    # Plotly's own source is the one script that may join.
    assert page.locator("script").count() == scripts + 1
    assert (
        page.locator("#page :is(img, textarea, script, b:not(.num, summary b, .lead > b, .hint > b), iframe)").count()
        == 0
    )
    for text in (
        "<script>window.xss=1</script>",
        "</textarea>",
        "</script>",
        "<b>",
        "&lt;",
        "$x$",
        "%{x}",
        "↵",
        "⇥",
        "U+0000",
        "xE2",
        "U+202E",
        "U+200B",
        "∅",
        "·Paris",
        "Paris",
        "👩\u200d🚀",
        "◌\u0301",
    ):
        assert text in seen, text
    # A real middle dot and the mark of a space look alike in text, not in the document.
    assert page.evaluate(
        "[...document.querySelectorAll('.token')].every(t => !/[\\u0000-\\u001f\\u202a-\\u202e]/.test(t.textContent))"
    )


BYTES = 256  # of the hostile tokenizer's vocabulary, before its hostile tokens


@pytest.fixture(scope="module")
def hostile_model(write_tiny, tmp_path_factory) -> Any:
    """A checkpoint on disk whose tokenizer.json holds what would break out of a page, in a folder of such a name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    import ov_circuits as ov
    from ov_circuits.checkpoint.tokenizer import byte_alphabet

    hostile = [token for token in dict.fromkeys(NASTY_TOKENS) if len(token.encode("utf-8", "replace")) > 1]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(sorted(byte_alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in hostile])
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=window.xss=1>"
    shutil.copytree(
        write_tiny("gpt2", vocab_size=backend.get_vocab_size(), bos_token_id=None, eos_token_id=None), folder
    )
    backend.save(str(folder / "tokenizer.json"))
    return ov.load(folder)


def test_a_checkpoint_with_a_hostile_tokenizer_stays_text_from_its_files_to_the_page(tab, hostile_model, tmp_path):
    import ov_circuits as ov
    from ov_circuits.prompts import Prompt, PromptSet

    model = hostile_model
    ids = list(range(BYTES, BYTES + 12))
    role = "</script><script>window.xss=1</script>"
    asked = Prompt(None, tuple(ids[:6]), False, (ids[6],), (ids[7],), {role: (1, 2), "start": (0,), "end": (5,)}, {})
    trace, generation = model.trace(ids), ov.generate(model, ids, 4)
    text = ov.scan(model, [ids, list(range(10, 22))], window=6)
    page_of = ov.dashboard(
        model,
        trace,
        ids[0],
        ids[1],
        prompts=PromptSet(f"<b>{role}", (asked, asked), {"<i>odd</i>": 1}, {}),
        generation=generation,
        scan=text,
        ablation=8,
        pairs=8,
        token_pairs=[(ids[0], ids[1])],
    )
    page = tab().open(page_of.save(tmp_path / "page.html"))
    scripts = page.content().count("</script>")
    seen: set[str] = set()
    for _ in walk(page):
        page.wait_for_timeout(200)
        seen |= set(page.locator("#page .token").all_text_contents())
        assert page.locator("#page :is(img, textarea, script, iframe, i)").count() == 0
    assert page.evaluate("window.xss") is None and page.content().count("</script>") <= scripts + 1
    assert {"<script>window.xss=1</script>", "</textarea>", "<!--", "<img·src=x·onerror=window.xss=1>"} <= seen
    page.evaluate("location.hash = 'set'")
    page.wait_for_selector(f".segmented button:text-is('{role}')")
    assert page.inner_text("h1") == model.name == "<img src=x onerror=window.xss=1>"
    shown = [page_of, model.head("1.2"), trace, generation, text, ov.scoreboard(model), ov.verify(model)]
    path = tmp_path / "notebook.html"
    body = "".join(value._repr_html_() for value in shown)
    path.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{body}", "utf-8", newline="")
    page = tab().page
    page.goto(path.as_uri())
    page.frame_locator("iframe").locator(".map-panel .cell >> nth=3").wait_for()
    assert page.evaluate("window.xss") is None and page.locator(":is(img, textarea, .ov-box i)").count() == 0
    assert page.frame_locator("iframe").locator("h1").inner_text() == model.name


def test_file_holds_no_token_and_no_outside_address():
    html = Dashboard(make_payload()).html
    for token in NASTY_TOKENS:
        if len(token) > 6 and token.strip() and token not in ("</script>", "{{ title }}"):
            assert token not in html
    assert "made-up &lt;model&gt;" in html and "made-up <model>" not in html
    for outside in ("src=", "@import", "url(http", "cdn.plot.ly/plotly", '<link rel="stylesheet'):
        assert outside not in html, outside
    assert "default-src 'none'" in html


def test_same_payload_same_bytes():
    assert Dashboard(make_payload()).html == Dashboard(make_payload()).html


def test_numbers_that_do_not_exist_are_null(tab, tmp_path):
    payload = make_payload(n_layers=2, n_heads=2, prompt=False)
    payload["values"]["stable_rank"] = [float("nan"), float("inf"), 1.0, None]
    path = tmp_path / "page.html"
    path.write_text(Dashboard(payload).html, "utf-8")
    page = tab().open(path)
    page.select_option("#score", "stable_rank")
    assert page.locator(".map-panel .cell.missing").count() == 3


def test_dark_follows_the_system_and_the_button(tab, pages):
    page = tab(scheme="dark").open(pages())
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    page.click("#theme")
    light = page.evaluate(paper)
    assert dark != light and page.evaluate("document.documentElement.dataset.theme") == "light"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate(paper) == light


VIEWS = {
    "": ".chart.drawn",
    "1.2": ".heat canvas",
    "paths": ".path-graph",
    "prompt": ".received td >> nth=0",
    "set": ".whiskers",
    "generation/2": ".steps tr.chosen",
    "compare/0.3,1.2": ".compare-card",
}


def walk(page: Any) -> Iterator[str]:
    """Every view in turn, waited for."""
    for address, part in VIEWS.items():
        page.evaluate("address => { location.hash = address }", address)
        page.wait_for_selector(part)
        yield address


@pytest.mark.parametrize("width", [420, 2400])
def test_nothing_overflows(tab, pages, width):
    page = tab(width=width).open(pages())
    for address in walk(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address


@pytest.mark.parametrize(
    ("shape", "limit_mb"), [(SHAPES["270 heads"], 12), (SHAPES["1024 heads"], 40)], ids=list(SHAPES)
)
def test_large_models_stay_small_and_are_painted_from_their_core_alone(tab, pages, shape, limit_mb):
    """How soon they are painted is measured in tests/benchmarks/page.py."""
    path = pages(**shape)
    assert path.stat().st_size <= limit_mb * 1e6
    one = tab()
    one.page.add_init_script(
        """new MutationObserver((_, observer) => {
             if (!document.querySelector('.map-panel .cell')) return;
             observer.disconnect();
             window.read = document.readyState;
             window.plotlyThere = Boolean(window.Plotly);
           }).observe(document, { childList: true, subtree: true })"""
    )
    page = one.open(path)
    assert page.locator(".map-panel .cell").count() == shape["n_layers"] * shape["n_heads"]
    assert page.evaluate("window.plotlyThere") is False, "the map is there before plotly"
    page.click(".map-panel .cell >> nth=100")
    page.wait_for_selector(".directions")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(tab, pages, axe_source, scheme):
    page = tab(scheme=scheme).open(pages(n_heads=6, n_kv_heads=2))
    # axe is brought in by the debugger, past the page's content security policy.
    page.evaluate(f"() => {{ {axe_source} }}")
    for address in walk(page):
        found = page.evaluate("async () => (await axe.run(document)).violations")
        serious = [
            (v["id"], [node["html"][:160] for node in v["nodes"][:3]])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == [], f"#{address}: {json.dumps(serious, indent=1)}"


def test_two_pages_in_one_notebook(browser, tmp_path):
    shown = [Dashboard(make_payload(n_layers=2, n_heads=2, seed=seed, prompt=False))._repr_html_() for seed in (1, 2)]
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{''.join(shown)}", "utf-8")
    one = Tab(browser)
    one.page.goto(path.as_uri())
    first, second = one.page.frame_locator("iframe >> nth=0"), one.page.frame_locator("iframe >> nth=1")
    first.locator(".map-panel .cell >> nth=3").click()
    first.locator(".directions").wait_for()
    assert first.locator("h2").inner_text() == "Head 1.1"
    second.locator(".map-panel .cell >> nth=0").wait_for()
    assert second.locator("h2").inner_text() == "Heads"
    first.locator("text=← Atlas").click()
    first.locator(".map-panel").wait_for()
    assert one.complaints == [] and one.requests == []
    assert one.page.url == path.as_uri()
    one.context.close()


@pytest.fixture(scope="module")
def notebook_page(tmp_path_factory) -> Path:
    """A notebook with every rich view twice, as `jupyter nbconvert --to html` exports it."""
    import nbformat
    from nbconvert import HTMLExporter

    import ov_circuits as ov

    model = ov.load()
    shown = [
        model.head("1.0"),
        model.trace("the people <b>of</b> the"),
        ov.scoreboard(model, tokens=2),
        ov.generate(model, "the people <b>of</b> the", 3),
        ov.scan(model, tokens=400),
        Dashboard(make_payload(n_layers=2, n_heads=2, prompt=False)),
    ]
    cells = [
        nbformat.v4.new_code_cell(
            f"# {type(value).__name__}",
            outputs=[
                nbformat.v4.new_output("execute_result", data={"text/html": value._repr_html_()}, execution_count=1)
            ],
        )
        for value in (*shown, *shown)
    ]
    exporter = HTMLExporter(template_name="basic")  # the full one loads MathJax from a CDN
    body, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    path = tmp_path_factory.mktemp("notebook") / "notebook.html"
    pictures = "<style>img,svg{max-width:100%;height:auto}</style>"  # JupyterLab's own rule, which the basic page lacks
    path.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{pictures}{body}", "utf-8")
    return path


def test_a_notebooks_pictures_have_the_size_they_are_drawn_for(tab, notebook_page):
    page = tab().page
    page.goto(notebook_page.as_uri())
    sizes = page.evaluate(
        "[...document.querySelector('.ov-row').querySelectorAll('svg')].map(s => [s.clientWidth, s.clientHeight])"
    )
    assert sizes == [[320, 150], [150, 150], [150, 150]]


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_an_exported_notebook_shows_everything_twice(tab, notebook_page, scripts):
    one = tab(scripts=scripts)
    page = one.page
    page.goto(notebook_page.as_uri())
    boxes = page.locator(".ov-box")
    assert boxes.count() == 10
    titles = ["Head 1.0 of", "A prompt through", "Scores of", "A continuation by", "embedded over the text"]
    for k, title in enumerate(titles * 2):
        assert title in boxes.nth(k).locator(".ov-title").inner_text()
        assert boxes.nth(k).locator("tbody tr").first.is_visible()
        assert boxes.nth(k).locator(".ov-token").count() > 3
    assert boxes.nth(0).locator("svg rect").count() == 32 and boxes.nth(0).locator("svg circle").count() == 64
    assert boxes.nth(2).locator(".ov-map tbody tr").count() == 4
    assert boxes.nth(3).locator("tbody tr").count() == 3 and boxes.nth(4).locator("tbody tr").count() == 24
    assert page.locator(".ov-box [id]").count() == 0 and page.locator(".ov-box :is(script, b)").count() == 0
    assert "·<" in boxes.nth(1).inner_text().replace(" ", "")
    for k in range(2):
        frame = page.frame_locator(f"iframe >> nth={k}")
        if scripts:
            frame.locator(".map-panel .cell >> nth=3").wait_for()
        else:
            frame.locator(".static tbody tr >> nth=3").wait_for()
            assert frame.locator("#page").is_hidden() and frame.locator("html.js").count() == 0


def test_hostile_text_stays_text_in_a_notebook(tab, tmp_path, tiny_gpt2_char):
    import ov_circuits as ov

    model = ov.load(tiny_gpt2_char)
    board = ov.scoreboard(model, ["ov_stable_rank"], tokens=2)
    names = [token for token in NASTY_TOKENS if token != "\udce2"]  # a tokenizer gives lone bytes as text
    board["reads_plus"] = [names] * len(board)
    board.attrs["model"] = board.attrs["view"] = "<script>window.xss=1</script>"
    traced = replace(model.trace([1, 2, 3]), texts=tuple(NASTY_TOKENS[:3]))
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>n</title>{board._repr_html_()}{traced._repr_html_()}", "utf-8"
    )
    page = tab().page
    page.goto(path.as_uri())
    assert page.evaluate("window.xss") is None
    assert page.locator("script, img, textarea, b").count() == 0
    shown = page.locator(".ov-token").all_text_contents()
    for text in ("<script>window.xss=1</script>", "</textarea>", "<!--", "U+202E", "∅", "&lt;", "·Paris"):
        assert text in shown, text


def test_what_is_cut_out_of_a_scoreboard_is_shown_as_what_it_is(tmp_path):
    import ov_circuits as ov

    board = ov.scoreboard(ov.load(), ["ov_stable_rank"], tokens=0)
    of_map = 'class="ov-map"'
    assert of_map in board._repr_html_()
    few = board.sort_values("ov_stable_rank").head(3)
    assert "ov-box" in few._repr_html_() and of_map not in few._repr_html_()
    assert "ov-box" not in board[["head", "ov_stable_rank"]]._repr_html_()
    assert "ov-box" not in board.drop(columns="ov_stable_rank").describe()._repr_html_()


def test_without_scripts_a_table_is_shown(tab, pages):
    one = tab(scripts=False)
    one.page.goto(pages().as_uri())
    assert one.page.locator(".static tbody tr").count() == HEADS
    assert one.page.locator(".static").is_visible() and one.page.locator("#page").is_hidden()
    assert one.page.locator(".static :is(script, textarea, b)").count() == 0


# Where notebooks put an output: the frame's sandbox, the policy of the document in it, and whether scripts run there. VS Code's
# policy is that of its notebook webview; Colab gives outputs an origin of their own; the others are stricter than any of them.
HOSTS = {
    "VS Code": (
        "allow-scripts allow-same-origin allow-forms allow-pointer-lock allow-downloads",
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src https: http: data:; "
        "font-src https:; connect-src https:; child-src https: data: blob:",
        True,
    ),
    "Colab": ("allow-downloads allow-forms allow-pointer-lock allow-popups allow-scripts", "", True),
    "no scripts": ("", "", False),
    "scripts forbidden": ("allow-scripts", "script-src 'none'", False),
}


# VS Code puts an output in as text, then runs each of its scripts at the end of the output.
VS_CODE = """<script>
for (const template of document.querySelectorAll('template')) {
  const container = document.body.appendChild(document.createElement('div'));
  container.innerHTML = template.innerHTML;
  for (const node of [...container.getElementsByTagName('script')]) {
    const script = document.createElement('script');
    script.text = node.innerText;
    container.appendChild(script).parentNode.removeChild(script);
  }
}
</script>"""


@pytest.mark.parametrize("host", HOSTS)
def test_in_a_notebooks_sandbox_it_works_or_shows_its_table(browser, tmp_path, host):
    sandbox, policy, works = HOSTS[host]
    outputs = [Dashboard(make_payload(n_layers=2, n_heads=2, seed=seed))._repr_html_() for seed in (1, 2)]
    shown = "".join(outputs)
    if host == "VS Code":
        shown = "".join(f"<template>{output}</template>" for output in outputs) + VS_CODE
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    inner = f'<!doctype html>{meta}<body style="color:#ccc;background:#222">{shown}'
    outer = f'<!doctype html><meta charset=utf-8><title>n</title><iframe style="width:1200px;height:2400px" sandbox="{sandbox}"'
    path = tmp_path / "notebook.html"
    path.write_text(f'{outer} srcdoc="{html.escape(inner)}"></iframe>', "utf-8")
    one = Tab(browser)
    one.page.goto(path.as_uri())
    output = one.page.frame_locator("iframe")
    for k in range(2):
        frame = output.frame_locator(f".ov-frame >> nth={k}")
        assert output.locator(".ov-instead").nth(k).is_hidden()
        if not works:
            frame.locator(".static tbody tr >> nth=3").wait_for()
            assert frame.locator("#page").is_hidden()
            continue
        frame.locator(".scatter-panel .chart.drawn").wait_for()
        frame.locator(".map-panel .cell >> nth=3").click()
        frame.locator(".heat canvas >> nth=0").wait_for()
        assert frame.locator("h2").inner_text() == "Head 1.1"
        # Light by the system, dark by the notebook around it; the reader's choice is the last word.
        frame.locator("html[data-theme=dark]").wait_for()
        frame.locator("#theme").click()
        frame.locator("html[data-theme=light]").wait_for()
        frame.locator("text=← Atlas").click()
        frame.locator("#filter").fill("layer > 0")
        assert frame.locator(".map-panel .cell:not(.dim)").count() == 2
    if works:
        output.locator("body").evaluate("body => { body.style.color = '#111'; }")
        output.locator("body").evaluate("() => new Promise((done) => setTimeout(done, 400))")
        assert output.frame_locator(".ov-frame >> nth=0").locator("html").get_attribute("data-theme") == "light"
        # Chromium remarks on VS Code's own frame.
        assert [said for said in one.complaints if "can escape its sandboxing" not in said] == []
    assert one.requests == []
    one.context.close()


def test_a_notebook_that_is_not_trusted_shows_the_table(tab, tmp_path):
    """JupyterLab and GitHub take styles, scripts and frames out of outputs that they do not trust."""
    shown = Dashboard(make_payload(n_layers=2, n_heads=2))._repr_html_()
    kept = re.sub(r"<(style|script|iframe)\b.*?</\1>", "", shown, flags=re.DOTALL)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{kept}", "utf-8")
    page = tab().page
    page.goto(path.as_uri())
    assert page.locator(".ov-instead").is_visible() and page.locator("iframe, script, style").count() == 0
    assert page.locator(".ov-instead tbody tr").count() == 4
    assert "trusted notebook" in page.inner_text(".ov-instead")


def test_save_writes_the_whole_page(tmp_path):
    dashboard = Dashboard(make_payload(n_layers=2, n_heads=2, prompt=False))
    path = dashboard.save(tmp_path / "page.html")
    assert path.read_text("utf-8") == dashboard.html
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
