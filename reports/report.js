"use strict";
// Sorts, filters and searches the tables. Without it every row is there and readable.
(() => {
  // Laying out thousands of rows takes seconds, so at first this many are shown (see report.css).
  const FIRST = 400;
  const collator = new Intl.Collator("en", { numeric: true });
  const tables = new Map();

  const make = (tag, props, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };

  // A cell's own text, without the quieter line below it.
  const textOf = (cell) =>
    Array.from(cell.childNodes, (node) => (node.nodeName === "SMALL" ? "" : node.textContent)).join("");

  // A number column's key: data-s where the text is not the number itself; null is no number.
  const numberOf = (cell) => {
    const key = Number(cell.dataset.s ?? (textOf(cell) || NaN));
    return Number.isNaN(key) ? null : key;
  };

  const byNumber = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  // Cells without a number come last in both directions; equals keep the order of the graph.
  const compare = (order, sign) => (a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
    return sign * order(a.key, b.key) || a.place - b.place;
  };

  class Table {
    constructor(table) {
      this.table = table;
      this.heads = Array.from(table.tHead.rows[0].cells);
      this.rows = Array.from(table.tBodies[0].rows);
      this.places = new Map(this.rows.map((row, index) => [row, index]));
      this.limit = FIRST;
      this.parts = [];
      this.status = make("output", {});
      this.more = make("button", { type: "button", className: "more" });
      this.more.addEventListener("click", () => { this.limit = Infinity; this.refresh(); });
      table.closest(".scroll").after(this.more);
      this.heads.forEach((head) => this.makeSortable(head));
    }

    makeSortable(head) {
      const button = make("button", { type: "button" }, ...head.childNodes);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        this.sort(head, now === null ? head.dataset.first || "asc" : now === "ascending" ? "desc" : "asc");
      });
      head.append(button);
    }

    sort(head, direction) {
      const numeric = head.dataset.kind === "num";
      const key = numeric ? numberOf : textOf;
      const order = numeric ? byNumber : collator.compare;
      const items = this.rows.map((row) => ({
        row, place: this.places.get(row), key: key(row.cells[head.cellIndex]),
      }));
      items.sort(compare(order, direction === "asc" ? 1 : -1));
      this.rows = items.map((item) => item.row);
      this.heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction === "asc" ? "ascending" : "descending");
      this.refresh();
      this.table.tBodies[0].append(...this.rows);
    }

    refresh() {
      const found = this.rows.filter((row) => this.parts.every((part) => part.accepts(row)));
      const shown = new Set(found.slice(0, this.limit));
      this.rows.forEach((row) => { row.hidden = !shown.has(row); });
      this.table.tBodies[0].classList.add("ready");
      this.more.hidden = shown.size === found.length;
      this.more.textContent = `Show all ${found.length} rows`;
      const some = shown.size < found.length ? `, the first ${shown.size} shown` : "";
      this.status.textContent = `${found.length} of ${this.rows.length} layers${some}`;
    }

    clear() {
      this.parts.forEach((part) => part.clear());
      this.refresh();
    }

    addControls(box) {
      const heads = this.heads.filter((head) => "filter" in head.dataset);
      this.parts = [this.search(), ...heads.map((head) => this.choice(head))];
      const reset = make("button", { type: "button", textContent: "Clear" });
      reset.addEventListener("click", () => this.clear());
      box.append(...this.parts.map((part) => part.node), reset, this.status);
      box.hidden = false;
    }

    choice(head) {
      const counts = new Map();
      for (const row of this.rows) {
        const text = textOf(row.cells[head.cellIndex]);
        counts.set(text, (counts.get(text) || 0) + 1);
      }
      const select = make("select", {}, make("option", { value: "", textContent: "all" }));
      for (const [text, count] of [...counts].sort((a, b) => collator.compare(a[0], b[0]))) {
        select.append(make("option", { value: text, textContent: `${text} (${count})` }));
      }
      select.addEventListener("change", () => this.refresh());
      return {
        node: make("label", {}, `${head.textContent.trim()} `, select),
        accepts: (row) => !select.value || textOf(row.cells[head.cellIndex]) === select.value,
        clear: () => { select.value = ""; },
      };
    }

    search() {
      const texts = new Map(this.rows.map((row) => [row, Array.from(row.cells, (cell) => cell.textContent).join(" ").toLowerCase()]));
      const field = make("input", { type: "search", placeholder: "name, role, note", spellcheck: false });
      field.addEventListener("input", () => this.refresh());
      return {
        node: make("label", {}, "Search ", field),
        accepts: (row) => field.value.toLowerCase().split(/\s+/).every((word) => texts.get(row).includes(word)),
        clear: () => { field.value = ""; },
      };
    }
  }

  // A link to a row that is not shown shows everything, so that it leads somewhere.
  const follow = () => {
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const owner = row && row.hidden && tables.get(row.closest("table"));
    if (!owner) return;
    owner.limit = Infinity;
    owner.clear();
    row.scrollIntoView({ block: "center" });
  };

  // On paper everything folded is open and every row is there; afterwards all is as it was.
  const prepareForPaper = () => {
    let opened = [];
    window.addEventListener("beforeprint", () => {
      opened = Array.from(document.querySelectorAll("details:not([open])"));
      opened.forEach((node) => { node.open = true; });
      tables.forEach((table) => { table.onScreen = table.limit; table.limit = Infinity; table.refresh(); });
    });
    window.addEventListener("afterprint", () => {
      opened.forEach((node) => { node.open = false; });
      tables.forEach((table) => { table.limit = table.onScreen; table.refresh(); });
    });
  };

  document.querySelectorAll("table.sortable").forEach((node) => tables.set(node, new Table(node)));
  document.querySelectorAll(".controls").forEach((box) => {
    tables.get(document.getElementById(box.dataset.for)).addControls(box);
  });
  tables.forEach((table) => table.refresh());
  window.addEventListener("hashchange", follow);
  follow();
  prepareForPaper();
})();
