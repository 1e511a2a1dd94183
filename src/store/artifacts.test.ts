import { createHash, randomBytes } from 'node:crypto';
import { mkdtempSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { Redactor } from '../core/index.ts';
import { FolderArtifacts } from './artifacts.ts';

let folder: string;
let artifacts: FolderArtifacts;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'lh-artifacts-'));
  artifacts = new FolderArtifacts(folder, new Redactor(['hunter2-hunter2']));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const pathOf = (sha256: string) => join(folder, sha256.slice(0, 2), sha256.slice(2));

test('bytes come back by their hash, from files closed to others', async () => {
  const bytes = randomBytes(100_000);
  const ref = await artifacts.put(bytes);
  expect(ref).toEqual({
    sha256: createHash('sha256').update(bytes).digest('hex'),
    bytes: 100_000,
  });
  expect(Buffer.from(await artifacts.get(ref.sha256)).equals(bytes)).toBe(true);
  expect(statSync(pathOf(ref.sha256)).mode & 0o777).toBe(0o600);
  expect(statSync(join(folder, ref.sha256.slice(0, 2))).mode & 0o777).toBe(0o700);
  expect(await artifacts.put(new Uint8Array())).toMatchObject({ bytes: 0 });
});

test('many puts of the same bytes at once leave one whole file', async () => {
  const bytes = randomBytes(300_000);
  const refs = await Promise.all(Array.from({ length: 20 }, () => artifacts.put(bytes)));
  const { sha256 } = refs[0]!;
  expect(new Set(refs.map((ref) => ref.sha256)).size).toBe(1);
  expect(readdirSync(join(folder, sha256.slice(0, 2)))).toEqual([sha256.slice(2)]);
});

test('a damaged file is an error on read, and a cut one is repaired by the next put', async () => {
  const bytes = Buffer.from('some tool output');
  const { sha256 } = await artifacts.put(bytes);
  writeFileSync(pathOf(sha256), 'some tool 0utput');
  await expect(artifacts.get(sha256)).rejects.toMatchObject({ code: 'Internal' });
  writeFileSync(pathOf(sha256), 'some');
  await artifacts.put(bytes);
  expect(Buffer.from(await artifacts.get(sha256)).toString()).toBe('some tool output');
});

test('an unknown hash is NotFound, and a path is not a hash', async () => {
  for (const hash of ['0'.repeat(64), '../../etc/passwd', ''])
    await expect(artifacts.get(hash)).rejects.toMatchObject({ code: 'NotFound' });
});

test('text is redacted before it is hashed; binary data is left alone', async () => {
  const { sha256 } = await artifacts.put(Buffer.from('login hunter2-hunter2 ok'));
  expect(Buffer.from(await artifacts.get(sha256)).toString()).toBe('login [redacted:secret] ok');
  const binary = Buffer.concat([Buffer.from([0xff, 0]), Buffer.from('hunter2-hunter2')]);
  const ref = await artifacts.put(binary);
  expect(Buffer.from(await artifacts.get(ref.sha256)).equals(binary)).toBe(true);
});

test('where the folder cannot be written the user is told', async () => {
  rmSync(folder, { recursive: true });
  writeFileSync(folder, '');
  await expect(artifacts.put(Buffer.from('x'))).rejects.toMatchObject({ code: 'ConfigInvalid' });
});
