"use strict";
// A small terminal: what shells and simple full-screen programs send, drawn as text. Screen.feed takes the bytes of a
// program, Screen.html draws them, keyBytes turns a key into what a program reads. Everything else is ignored.

class Screen {
  constructor(rows, columns) {
    this.decoder = new TextDecoder();
    this.rows = rows;
    this.columns = columns;
    this.reset();
  }

  reset() {
    this.lines = Array.from({ length: this.rows }, () => this.blank());
    this.row = this.column = 0;
    this.style = "";
    this.top = 0;
    this.bottom = this.rows - 1;
    this.saved = [0, 0];
    this.pending = "";
    this.kept = null;
    this.cursorShown = true;
  }

  blank() {
    return Array.from({ length: this.columns }, () => [" ", ""]);
  }

  feed(bytes) {
    let text = this.pending + this.decoder.decode(bytes, { stream: true });
    this.pending = "";
    while (text) {
      if (text[0] === "\x1b") {
        const match = /^\x1b(?:\[([?>=!]?)([0-9;:]*)([ -/]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()*+#%][\s\S]|[=>78cDEHMNOZ\\])/.exec(text);
        if (!match) {
          if (text.length < 4096 && /^\x1b(?:$|\[[?>=!]?[0-9;:]*[ -/]*$|\][^\x07\x1b]*\x1b?$|[()*+#%]$)/.test(text)) {
            this.pending = text; // The rest of it comes with the next bytes.
            return;
          }
          text = text.slice(1);
          continue;
        }
        if (match[4]) this.control(match[1], match[2], match[4]);
        else this.escape(text[1]);
        text = text.slice(match[0].length);
        continue;
      }
      const run = /^[^\x00-\x1f\x7f]+/.exec(text);
      if (run) {
        for (const character of run[0]) this.put(character);
        text = text.slice(run[0].length);
      } else {
        this.single(text[0]);
        text = text.slice(1);
      }
    }
  }

  put(character) {
    if (this.column >= this.columns) {
      this.column = 0;
      this.down();
    }
    this.lines[this.row][this.column++] = [character, this.style];
  }

  down() {
    if (this.row === this.bottom) this.scroll(1);
    else if (this.row < this.rows - 1) this.row++;
  }

  scroll(count) {
    for (let n = 0; n < Math.min(Math.abs(count), this.rows); n++) {
      if (count > 0) {
        this.lines.splice(this.top, 1);
        this.lines.splice(this.bottom, 0, this.blank());
      } else {
        this.lines.splice(this.bottom, 1);
        this.lines.splice(this.top, 0, this.blank());
      }
    }
  }

  single(character) {
    if (character === "\n") this.down();
    else if (character === "\r") this.column = 0;
    else if (character === "\b") this.column = Math.max(0, Math.min(this.column, this.columns) - 1);
    else if (character === "\t") this.column = Math.min(this.columns - 1, (this.column | 7) + 1);
  }

  escape(letter) {
    if (letter === "7") this.saved = [this.row, this.column];
    else if (letter === "8") [this.row, this.column] = this.saved;
    else if (letter === "c") this.reset();
    else if (letter === "D") this.down();
    else if (letter === "E") { this.column = 0; this.down(); }
    else if (letter === "M") { if (this.row === this.top) this.scroll(-1); else this.row = Math.max(0, this.row - 1); }
  }

  control(mark, given, letter) {
    const numbers = given.split(/[;:]/).map((text) => parseInt(text, 10) || 0);
    const one = Math.min(Math.max(1, numbers[0]), 2000);
    const line = this.lines[this.row];
    if (mark) {
      if (mark === "?" && (letter === "h" || letter === "l")) this.mode(numbers, letter === "h");
      return;
    }
    switch (letter) {
      case "A": this.row = Math.max(0, this.row - one); break;
      case "B": case "e": this.row = Math.min(this.rows - 1, this.row + one); break;
      case "C": case "a": this.column = Math.min(this.columns - 1, this.column + one); break;
      case "D": this.column = Math.max(0, Math.min(this.column, this.columns - 1) - one); break;
      case "E": this.row = Math.min(this.rows - 1, this.row + one); this.column = 0; break;
      case "F": this.row = Math.max(0, this.row - one); this.column = 0; break;
      case "G": case "`": this.column = Math.min(this.columns, one) - 1; break;
      case "d": this.row = Math.min(this.rows, one) - 1; break;
      case "H": case "f":
        this.row = Math.min(this.rows, one) - 1;
        this.column = Math.min(this.columns, Math.max(1, numbers[1] || 1)) - 1;
        break;
      case "J": this.eraseScreen(numbers[0]); break;
      case "K": this.eraseLine(numbers[0]); break;
      case "L": case "M":
        if (this.row >= this.top && this.row <= this.bottom) {
          const top = this.top;
          this.top = this.row;
          this.scroll(letter === "M" ? one : -one);
          this.top = top;
        }
        break;
      case "P": line.splice(this.column, one); while (line.length < this.columns) line.push([" ", ""]); break;
      case "@":
        for (let n = 0; n < Math.min(one, this.columns); n++) line.splice(this.column, 0, [" ", ""]);
        line.length = this.columns;
        break;
      case "X": for (let n = this.column; n < Math.min(this.columns, this.column + one); n++) line[n] = [" ", ""]; break;
      case "S": this.scroll(one); break;
      case "T": this.scroll(-one); break;
      case "m": this.paint(numbers); break;
      case "r":
        this.top = Math.min(this.rows, one) - 1;
        this.bottom = Math.min(this.rows, numbers[1] || this.rows) - 1;
        if (this.top >= this.bottom) { this.top = 0; this.bottom = this.rows - 1; }
        this.row = this.column = 0;
        break;
      case "s": this.saved = [this.row, this.column]; break;
      case "u": [this.row, this.column] = this.saved; break;
    }
  }

  mode(numbers, on) {
    if (numbers.includes(25)) this.cursorShown = on;
    if (numbers.includes(1049) || numbers.includes(47) || numbers.includes(1047)) {
      if (on && !this.kept) {
        this.kept = [this.lines, this.row, this.column];
        this.lines = Array.from({ length: this.rows }, () => this.blank());
      } else if (!on && this.kept) {
        [this.lines, this.row, this.column] = this.kept;
        this.kept = null;
      }
    }
  }

  eraseScreen(what) {
    const from = what === 0 ? this.row + 1 : 0;
    const to = what === 1 ? this.row : this.rows;
    for (let n = from; n < to; n++) this.lines[n] = this.blank();
    if (what < 2) this.eraseLine(what);
  }

  eraseLine(what) {
    const from = what === 0 ? this.column : 0;
    const to = what === 1 ? this.column + 1 : this.columns;
    for (let n = from; n < Math.min(to, this.columns); n++) this.lines[this.row][n] = [" ", ""];
  }

  paint(numbers) {
    for (let at = 0; at < numbers.length; at++) {
      const number = numbers[at];
      const styles = new Set(this.style.split(" ").filter(Boolean));
      const dropColour = () => { for (const style of [...styles]) if (style[0] === "f") styles.delete(style); };
      if (number === 0) styles.clear();
      else if (number === 1) styles.add("b");
      else if (number === 4) styles.add("u");
      else if (number === 7) styles.add("r");
      else if (number === 22) styles.delete("b");
      else if (number === 24) styles.delete("u");
      else if (number === 27) styles.delete("r");
      else if (number === 39) dropColour();
      else if ((number >= 30 && number <= 37) || (number >= 90 && number <= 97)) { dropColour(); styles.add("f" + (number % 10)); }
      else if (number === 38 || number === 48) at += numbers[at + 1] === 5 ? 2 : 4;
      this.style = [...styles].join(" ");
    }
  }

  // Into `element`, as text nodes: nothing that a program prints is ever read as HTML.
  draw(element) {
    const drawn = document.createDocumentFragment();
    this.lines.forEach((line, row) => {
      let text = "", style = null;
      const flush = () => {
        if (!text) return;
        const span = document.createElement("span");
        if (style) span.className = style;
        span.textContent = text;
        drawn.append(span);
        text = "";
      };
      line.forEach(([character, own], column) => {
        const here = this.cursorShown && row === this.row && column === Math.min(this.column, this.columns - 1);
        const wanted = here ? "cursor" : own;
        if (wanted !== style) { flush(); style = wanted; }
        text += character;
      });
      flush();
      drawn.append("\n");
    });
    element.replaceChildren(drawn);
  }
}

const KEYS = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Delete: "\x1b[3~", Insert: "\x1b[2~",
  ArrowUp: "\x1b[A", ArrowDown: "\x1b[B", ArrowRight: "\x1b[C", ArrowLeft: "\x1b[D",
  Home: "\x1b[H", End: "\x1b[F", PageUp: "\x1b[5~", PageDown: "\x1b[6~",
};

function keyBytes(event) {
  if (event.metaKey) return null;
  if (KEYS[event.key]) return KEYS[event.key];
  if (event.key.length !== 1) return null;
  if (event.ctrlKey) {
    const code = event.key.toUpperCase().charCodeAt(0);
    return code >= 64 && code < 96 ? String.fromCharCode(code - 64) : null;
  }
  return (event.altKey ? "\x1b" : "") + event.key;
}
