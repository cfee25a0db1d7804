"use strict";
// Describes the place under the pointer, or under the arrow keys. Pictures and tables need no script.
(() => {
  const count = (value) => (value === null || value < 0 ? "–" : value.toLocaleString("en-US"));

  const inflate = async (id) => {
    const letters = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  };

  // Each kind of picture: how many steps the arrow keys make, and the text of a step.
  const kinds = {
    points: (data) => ({
      columns: data.at.length,
      rows: 1,
      columnAt: (share) => {
        let nearest = 0;
        data.at.forEach((at, number) => {
          if (Math.abs(at - share) < Math.abs(data.at[nearest] - share)) nearest = number;
        });
        return nearest;
      },
      mark: (column) => [data.at[column], 0, 0, 1],
      text: (column) => data.lines[column],
    }),
    heat: (data) => {
      const orders = [];
      const row = (number) => data.counts.slice(number * data.columns, (number + 1) * data.columns);
      const orderOf = (number) => {
        const counts = row(number);
        const experts = counts.map((_, expert) => expert);
        orders[number] ??= experts.sort((a, b) => counts[b] - counts[a] || a - b);
        return orders[number];
      };
      return grid(data, (column, number) => {
        const counts = row(number);
        const expert = orderOf(number)[column];
        if (counts[expert] < 0) return null;
        const present = counts.filter((one) => one >= 0);
        const total = present.reduce((sum, one) => sum + one, 0);
        const multiple = total ? (counts[expert] * present.length) / total : 0;
        return [
          `layer ${data.layers[number]}, expert ${expert}`,
          `${count(counts[expert])} selections, ${multiple.toPrecision(3)} × a uniform share`,
          `number ${count(column + 1)} of ${count(present.length)} in its layer`,
        ].join("\n");
      });
    },
    blobs: (data) => {
      const offsets = [];
      let first = 0;
      const firsts = data.counts.map((length) => (first += length) - length);
      data.files.forEach((_, file) => {
        let end = 0;
        for (let blob = firsts[file]; blob < firsts[file] + data.counts[file]; blob++) {
          offsets[blob] = end + data.skip[blob];
          end = offsets[blob] + data.length[blob];
        }
      });
      return grid(data, (column, row) => {
        const file = data.starts.findLastIndex((start) => start <= row);
        const place = (row - data.starts[file]) * data.columns + column;
        if (place >= data.counts[file]) return null;
        const blob = firsts[file] + place;
        return [
          `layer ${data.layer[blob]}, expert ${data.expert[blob]}`,
          `${count(data.hotness[blob])} selections`,
          `${count(data.length[blob])} bytes at byte ${count(offsets[blob])}`,
          `of ${data.files[file]}`,
        ].join("\n");
      });
    },
  };

  const grid = (data, text) => ({
    columns: data.columns,
    rows: data.rows,
    columnAt: (share) => Math.min(data.columns - 1, Math.floor(share * data.columns)),
    mark: (column, row) => [column / data.columns, row / data.rows, 1 / data.columns, 1 / data.rows],
    text,
  });

  const enliven = (figure) => {
    const [plot, mark, tip] = [".plot", ".mark", ".tip"].map((name) => figure.querySelector(name));
    let loading = null;
    let column = 0;
    let row = 0;

    const load = () => {
      loading ??= (async () => {
        const data = JSON.parse(await inflate(figure.dataset.pointer));
        return kinds[data.kind](data);
      })();
      return loading;
    };

    const area = () => {
      const [inner, outer] = [plot.querySelector(".area"), plot].map((one) => one.getBoundingClientRect());
      return [inner.left - outer.left, inner.top - outer.top, inner.width, inner.height];
    };

    const hide = () => {
      mark.hidden = tip.hidden = true;
    };

    const show = (kind) => {
      const text = kind.text(column, row);
      if (text === null) return hide();
      const [left, top, width, height] = area();
      const [x, y, wide, high] = kind.mark(column, row);
      mark.hidden = tip.hidden = false;
      mark.style.left = `${left + x * width}px`;
      mark.style.top = `${top + y * height}px`;
      mark.style.width = `${wide * width}px`;
      mark.style.height = `${high * height}px`;
      tip.textContent = text;
      const middle = left + (x + wide / 2) * width;
      const room = plot.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, middle + 14))}px`;
      if (middle + 14 > room) tip.style.left = `${Math.max(0, middle - 14 - tip.offsetWidth)}px`;
      const below = top + (y + high) * height + 10;
      tip.style.top = kind.rows === 1 ? `${top + 8}px` : `${below}px`;
    };

    const follow = async (event) => {
      const kind = await load();
      const bounds = plot.getBoundingClientRect();
      const [left, top, width, height] = area();
      const across = (event.clientX - bounds.left - left) / width;
      const down = (event.clientY - bounds.top - top) / height;
      if (across < 0 || across > 1 || down < 0 || down > 1) return hide();
      column = kind.columnAt(across);
      row = Math.min(kind.rows - 1, Math.floor(down * kind.rows));
      show(kind);
    };

    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", async (event) => {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key === "Escape") return hide();
      if (!(event.key in steps)) return;
      event.preventDefault();
      const kind = await load();
      if (!tip.hidden) {
        const [right, down] = steps[event.key];
        column = Math.max(0, Math.min(kind.columns - 1, column + right));
        row = Math.max(0, Math.min(kind.rows - 1, row + down));
      }
      show(kind);
    });
  };

  document.querySelectorAll("figure[data-pointer]").forEach(enliven);
  document.documentElement.classList.add("scripted");

  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", async () => {
    const link = document.createElement("a");
    const body = new Blob([await inflate("facts")], { type: "application/json" });
    link.href = URL.createObjectURL(body);
    link.download = "report.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
