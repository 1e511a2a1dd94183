/** One entry of an initial RAM file system. `mode` holds the file type too. */
export interface CpioEntry {
  /** Without a leading slash. */
  name: string;
  mode: number;
  /** Seconds since 1970: Python takes a compiled file only where it matches its source. */
  modified: number;
  data: Uint8Array;
}

const TRAILER = 'TRAILER!!!';
const EMPTY = new Uint8Array();

function padded(bytes: number): Buffer {
  return Buffer.alloc((4 - (bytes % 4)) % 4);
}

/** A cpio archive in the "newc" format, as Documentation/driver-api/early-userspace/buffer-format.rst has it. */
export function cpioArchive(entries: readonly CpioEntry[]): Buffer {
  const parts: Uint8Array[] = [];
  const all = [...entries, { name: TRAILER, mode: 0, modified: 0, data: EMPTY }];
  all.forEach(({ name, mode, modified, data }, index) => {
    const label = Buffer.from(`${name}\0`);
    const fields = [
      ...[index + 1, mode, 0, 0, 1, modified, data.length],
      ...[0, 0, 0, 0, label.length, 0],
    ];
    const header = Buffer.from(
      `070701${fields.map((field) => field.toString(16).padStart(8, '0')).join('')}`,
    );
    parts.push(header, label, padded(header.length + label.length), data, padded(data.length));
  });
  return Buffer.concat(parts);
}
