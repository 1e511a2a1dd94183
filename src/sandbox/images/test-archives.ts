import { createHash } from 'node:crypto';
import { mkdirSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { gzipSync, zstdCompressSync } from 'node:zlib';
import { hostPlatform } from './oci.ts';

/** A member of a tar as a test wants it, sensible or not. */
export interface Member {
  name: string;
  /** `0` file, `1` hard link, `2` symlink, `3` character device, `5` directory, `6` pipe. */
  type?: string;
  mode?: number;
  content?: string | Buffer;
  link?: string;
}

export function tar(members: readonly Member[]): Buffer {
  const blocks = members.flatMap((member) => {
    const content = Buffer.from((member.content ?? '') as string);
    const header = Buffer.alloc(512);
    const octal = (value: number, at: number, width: number) =>
      header.write(`${value.toString(8).padStart(width - 1, '0')}\0`, at, 'latin1');
    header.write(member.name, 0, 100);
    octal(member.mode ?? 0o644, 100, 8);
    octal(0, 108, 8);
    octal(0, 116, 8);
    octal(content.length, 124, 12);
    octal(1_700_000_000, 136, 12);
    header.fill(' ', 148, 156);
    header.write(member.type ?? '0', 156, 'latin1');
    header.write(member.link ?? '', 157, 100);
    header.write('ustar\x0000', 257, 'latin1');
    if (member.type === '3') {
      octal(1, 329, 8);
      octal(3, 337, 8);
    }
    const sum = header.reduce((total, byte) => total + byte, 0);
    header.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
    return [header, content, Buffer.alloc((512 - (content.length % 512)) % 512)];
  });
  return Buffer.concat([...blocks, Buffer.alloc(1024)]);
}

export const sha = (bytes: Buffer | string) => createHash('sha256').update(bytes).digest('hex');
const digestOf = (bytes: Buffer) => `sha256:${sha(bytes)}`;
const json = (value: unknown) => Buffer.from(JSON.stringify(value));

export interface TestImage {
  layers: Buffer[];
  config?: Record<string, unknown>;
  architecture?: string;
  name?: string;
}

function configOf(image: TestImage): Buffer {
  const [os, architecture] = hostPlatform().split('/');
  return json({
    os,
    architecture: image.architecture ?? architecture,
    config: image.config ?? {},
    rootfs: { type: 'layers', diff_ids: image.layers.map(digestOf) },
    history: image.layers.map((_, index) => ({ created_by: `layer ${index}` })),
  });
}

/** Files of an archive by path. */
export type Files = Map<string, Buffer>;

/** An OCI layout: layers gzip, zstd and plain in turn, and an index below the index. */
export function ociLayout(image: TestImage): Files {
  const files: Files = new Map();
  const blob = (bytes: Buffer, mediaType: string, more = {}) => {
    files.set(`blobs/sha256/${sha(bytes)}`, bytes);
    return { mediaType, digest: digestOf(bytes), size: bytes.length, ...more };
  };
  const layer = 'application/vnd.oci.image.layer.v1.tar';
  const layers = image.layers.map((bytes, index) =>
    index % 3 === 0
      ? blob(gzipSync(bytes), `${layer}+gzip`)
      : index % 3 === 1
        ? blob(zstdCompressSync(bytes), `${layer}+zstd`)
        : blob(bytes, layer),
  );
  const manifest = (config: Buffer, platform: Record<string, string>) =>
    blob(
      json({
        schemaVersion: 2,
        config: blob(config, 'application/vnd.oci.image.config.v1+json'),
        layers,
      }),
      'application/vnd.oci.image.manifest.v1+json',
      { platform },
    );
  const [os, architecture] = hostPlatform().split('/') as [string, string];
  const index = blob(
    json({
      schemaVersion: 2,
      manifests: [
        manifest(configOf({ ...image, architecture: 's390x' }), { os, architecture: 's390x' }),
        manifest(configOf(image), { os, architecture: image.architecture ?? architecture }),
        manifest(json({}), { os: 'unknown', architecture: 'unknown' }),
      ],
    }),
    'application/vnd.oci.image.index.v1+json',
    { annotations: { 'org.opencontainers.image.ref.name': image.name ?? 'test:1' } },
  );
  files.set('oci-layout', json({ imageLayoutVersion: '1.0.0' }));
  files.set('index.json', json({ schemaVersion: 2, manifests: [index] }));
  return files;
}

/** What `docker save` wrote before it wrote OCI layouts. */
export function dockerSave(image: TestImage): Files {
  const config = configOf(image);
  const files: Files = new Map([[`${sha(config)}.json`, config]]);
  const Layers = image.layers.map((bytes, index) => {
    files.set(`${sha(`${index}`)}/layer.tar`, bytes);
    return `${sha(`${index}`)}/layer.tar`;
  });
  const entry = { Config: `${sha(config)}.json`, RepoTags: [image.name ?? 'test:1'], Layers };
  files.set('manifest.json', json([entry]));
  return files;
}

export function asTar(files: Files): Buffer {
  return tar([...files].map(([name, content]) => ({ name, content })));
}

export function asFolder(files: Files, folder: string): string {
  for (const [name, content] of files) {
    mkdirSync(dirname(join(folder, name)), { recursive: true });
    writeFileSync(join(folder, name), content);
  }
  return folder;
}
