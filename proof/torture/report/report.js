// Zoom, and a place for facts. The page can be read without any of it.
"use strict";
(() => {
  const note = document.getElementById("facts");
  const MOST = 500;
  const NARROW = 640;

  document.documentElement.classList.add("live");

  function show(mark, x, y) {
    note.textContent = mark.dataset.facts;
    note.hidden = false;
    const room = 14;
    const left = Math.min(x + room, innerWidth - note.offsetWidth - 8);
    const below = y + room + note.offsetHeight < innerHeight;
    note.style.left = `${Math.max(8, left)}px`;
    note.style.top = `${below ? y + room : Math.max(8, y - room - note.offsetHeight)}px`;
  }

  function showAt(mark) {
    const box = mark.getBoundingClientRect();
    show(mark, Math.max(box.left, 0), box.bottom);
  }

  function hide() {
    note.hidden = true;
    for (const mark of document.querySelectorAll(".chosen")) mark.classList.remove("chosen");
  }

  // What the browser would show by itself, after a while and where it likes.
  for (const title of document.querySelectorAll(".marks title")) {
    const mark = title.parentNode;
    mark.dataset.facts = title.textContent;
    mark.setAttribute("aria-label", title.textContent);
    title.remove();
  }

  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.("[data-facts]");
    if (mark && !event.buttons) show(mark, event.clientX, event.clientY);
    else if (!document.querySelector(".chosen")) hide();
  });
  document.addEventListener(
    "scroll",
    () => {
      const chosen = document.querySelector(".chosen");
      if (chosen) showAt(chosen);
      else hide();
    },
    { passive: true },
  );

  // The same round steps as those of a page without a script.
  function step(least) {
    for (let power = 1e-6; power < 100; power *= 10)
      for (const factor of [1, 2, 5]) if (factor * power >= least && factor * power < 60) return factor * power;
    for (const minutes of [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1440])
      if (minutes * 60 >= least) return minutes * 60;
    return Math.ceil(least / 86400) * 86400;
  }

  function clock(seconds, apart) {
    if (apart >= 9.99) {
      const whole = Math.round(Math.abs(seconds));
      const sign = seconds < 0 ? "-" : "";
      return `${sign}${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
    }
    return `${seconds.toFixed(Math.max(0, Math.ceil(-Math.log10(apart) - 1e-9)))} s`;
  }

  class Chart {
    constructor(frame) {
      this.svg = frame.querySelector(".marks");
      this.began = Number(frame.dataset.began);
      this.seconds = Number(frame.dataset.seconds);
      this.ticks = this.svg.querySelector(".ticks");
      this.curves = this.svg.querySelector(".curves");
      this.axis = Number(this.svg.querySelector(".axis").getAttribute("y1"));
      this.places = [...this.svg.querySelectorAll("rect[x], use[x], text[x]")]
        .filter((mark) => !this.ticks.contains(mark))
        .map((mark) => ({ mark, x: parseFloat(mark.getAttribute("x")), width: parseFloat(mark.getAttribute("width")) }));
      this.facts = this.places
        .filter(({ mark }) => "facts" in mark.dataset && !mark.classList.contains("unseen"))
        .sort((one, other) => one.x - other.x);
      this.at = null;
      this.left = 0;
      this.zoom = 1;
      this.svg.tabIndex = 0;
      this.svg.addEventListener("keydown", (event) => this.key(event));
      this.svg.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.svg.addEventListener("pointerdown", (event) => this.grab(event));
      this.svg.addEventListener("dblclick", (event) => this.scale(3, this.share(event)));
      this.svg.addEventListener("blur", hide);
      this.name();
    }

    share(event) {
      const box = this.svg.getBoundingClientRect();
      return (event.clientX - box.left) / box.width;
    }

    // Zoom so that what lies at `share` of the width stays there.
    scale(factor, share) {
      const zoom = Math.min(Math.max(this.zoom * factor, 1), MOST);
      this.move(this.left + share / this.zoom - share / zoom, zoom);
    }

    move(left, zoom = this.zoom) {
      this.zoom = zoom;
      this.at = null;
      this.left = Math.min(Math.max(left, 0), 1 - 1 / zoom);
      hide();
      for (const { mark, x, width } of this.places) {
        mark.setAttribute("x", `${(x - 100 * this.left) * zoom}%`);
        if (width >= 0) mark.setAttribute("width", `${width * zoom}%`);
      }
      if (this.curves) {
        const height = this.curves.getAttribute("height");
        this.curves.setAttribute("viewBox", `${1000 * this.left} 0 ${1000 / zoom} ${height}`);
      }
      this.svg.classList.toggle("zoomed", zoom > 1);
      this.name();
    }

    name() {
      const width = this.svg.getBoundingClientRect().width;
      const seconds = this.seconds / this.zoom;
      const began = this.began + this.seconds * this.left;
      const apart = step(seconds / Math.max(2, Math.min(8, width / (width < NARROW ? 80 : 120))));
      const made = [];
      for (let number = Math.ceil(began / apart); number * apart <= began + seconds; number++) {
        const share = (number * apart - began) / seconds;
        const anchor = share * width < 24 ? "start" : (1 - share) * width < 24 ? "end" : "middle";
        const line = document.createElementNS(this.svg.namespaceURI, "line");
        const text = document.createElementNS(this.svg.namespaceURI, "text");
        for (const end of ["x1", "x2"]) line.setAttribute(end, `${100 * share}%`);
        line.setAttribute("y1", this.axis);
        line.setAttribute("y2", this.axis + 5);
        text.setAttribute("x", `${100 * share}%`);
        text.setAttribute("y", this.axis + 17);
        text.setAttribute("text-anchor", anchor);
        text.setAttribute("class", "tick");
        text.textContent = clock(number * apart, apart);
        made.push(line, text);
      }
      this.ticks.replaceChildren(...made);
    }

    // From the mark that was shown last, or from the left edge if the chart has been moved since.
    step(by) {
      const count = this.facts.length;
      if (!count) return;
      const first = this.facts.findIndex(({ x }) => x >= 100 * this.left);
      const from = this.at ?? (by > 0 ? first - 1 : first);
      const at = (from + by + count) % count;
      const { mark, x } = this.facts[at];
      if (x < 100 * this.left || x > 100 * (this.left + 1 / this.zoom)) this.move(x / 100 - 0.5 / this.zoom);
      this.at = at;
      hide();
      mark.classList.add("chosen");
      showAt(mark);
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const does = {
        "+": () => this.scale(1.6, 0.5),
        "=": () => this.scale(1.6, 0.5),
        "-": () => this.scale(1 / 1.6, 0.5),
        0: () => this.move(0, 1),
        ArrowLeft: () => this.move(this.left - 0.2 / this.zoom),
        ArrowRight: () => this.move(this.left + 0.2 / this.zoom),
        "[": () => this.step(-1),
        "]": () => this.step(1),
        Escape: hide,
      }[event.key];
      if (!does) return;
      event.preventDefault();
      does();
    }

    // The wheel alone scrolls the page, as everywhere.
    wheel(event) {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.scale(event.deltaY < 0 ? 1.25 : 0.8, this.share(event));
    }

    grab(event) {
      if (this.zoom === 1 || event.button) return;
      const from = this.share(event);
      const left = this.left;
      const drag = (moved) => this.move(left - (this.share(moved) - from) / this.zoom);
      const drop = () => removeEventListener("pointermove", drag);
      addEventListener("pointermove", drag);
      addEventListener("pointerup", drop, { once: true });
    }
  }

  const charts = [...document.querySelectorAll(".chart")].map((frame) => new Chart(frame));
  addEventListener("resize", () => charts.forEach((chart) => chart.name()));
})();
