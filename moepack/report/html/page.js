"use strict";
// Describes the place under the pointer, or under the arrow keys. Pictures and tables need no script.
(() => {
  const inflate = async (id) => {
    const letters = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  };

  // The text of a cell: its values in the place of their names; null if there is no such cell.
  const textOf = ({ text, values }, cell) => {
    if (Object.values(values)[0][cell] === null) return null;
    return text.replace(/\{(\w+)(:,)?\}/g, (_, name, isNumber) => {
      const value = values[name][cell];
      if (value === null) return "–";
      return isNumber ? value.toLocaleString("en-US") : value;
    });
  };

  const nearest = (places, share) => {
    const distances = places.map((place) => Math.abs(place - share));
    return distances.indexOf(Math.min(...distances));
  };

  const enliven = (figure) => {
    const [plot, mark, tip] = [".plot", ".mark", ".tip"].map((name) => figure.querySelector(name));
    let loading = null;
    let column = 0;
    let row = 0;

    const load = () => (loading ??= inflate(figure.dataset.pointer).then(JSON.parse));

    const area = () => {
      const [inner, outer] = [plot.querySelector(".area"), plot].map((one) => one.getBoundingClientRect());
      return [inner.left - outer.left, inner.top - outer.top, inner.width, inner.height];
    };

    const hide = () => {
      mark.hidden = tip.hidden = true;
    };

    const show = (data) => {
      const text = textOf(data, row * data.column_count + column);
      if (text === null) return hide();
      const [left, top, width, height] = area();
      const [wide, high] = [data.at ? 0 : 1 / data.column_count, 1 / data.row_count];
      const [x, y] = [data.at ? data.at[column] : column * wide, row * high];
      mark.hidden = tip.hidden = false;
      mark.style.left = `${left + x * width}px`;
      mark.style.top = `${top + y * height}px`;
      mark.style.width = `${wide * width}px`;
      mark.style.height = `${high * height}px`;
      tip.textContent = text;
      const middle = left + (x + wide / 2) * width;
      const room = plot.clientWidth - tip.offsetWidth;
      tip.style.left = `${middle + 14 > room ? Math.max(0, middle - 14 - tip.offsetWidth) : middle + 14}px`;
      tip.style.top = `${top + (data.at ? 8 : (y + high) * height + 10)}px`;
    };

    const follow = async (event) => {
      const data = await load();
      const bounds = plot.getBoundingClientRect();
      const [left, top, width, height] = area();
      const across = (event.clientX - bounds.left - left) / width;
      const down = (event.clientY - bounds.top - top) / height;
      if (across < 0 || across > 1 || down < 0 || down > 1) return hide();
      const { at, column_count, row_count } = data;
      column = at ? nearest(at, across) : Math.min(column_count - 1, Math.floor(across * column_count));
      row = Math.min(row_count - 1, Math.floor(down * row_count));
      show(data);
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
      const data = await load();
      if (!tip.hidden) {
        const [right, down] = steps[event.key];
        column = Math.max(0, Math.min(data.column_count - 1, column + right));
        row = Math.max(0, Math.min(data.row_count - 1, row + down));
      }
      show(data);
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
