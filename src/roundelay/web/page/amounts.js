// How numbers read.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// 1536 -> 1.5 KiB, as `nbytes_text` writes it.
function bytesText(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${Number(bytes.toPrecision(3))} ${UNITS[unit]}`;
}

export { bytesText };
