import { describe, expect, test } from 'vitest';
import { FileFault, type FileNode, MemoryFiles, type MemoryNode } from './files.ts';

const LIMITS = { diskBytes: 10_000, inodes: 20 };
const file = (text: string): FileNode => ({
  kind: 'file',
  data: new Uint8Array(Buffer.from(text)),
  mode: 0o644,
  modifiedMs: 0,
});
const link = (target: string): MemoryNode => ({ kind: 'symlink', target, modifiedMs: 0 });
const textAt = (files: MemoryFiles, path: string) =>
  Buffer.from((files.node(path) as FileNode).data).toString();
function tree(): MemoryFiles {
  const files = new MemoryFiles(LIMITS);
  files.makeDirectory('/workspace/a');
  files.makeDirectory('/workspace/a/b');
  files.set('/workspace/a/b/c', file('text'));
  files.takeChanges();
  return files;
}
const errno = (call: () => unknown) => {
  try {
    call();
  } catch (error) {
    return (error as FileFault).errno;
  }
  return 'none';
};

describe('paths', () => {
  test('lead through links and dots, and never above the root', () => {
    const files = tree();
    files.set('/workspace/l', link('a/b'));
    files.set('/workspace/up', link('../../../..'));
    expect(files.resolve('l/c', true)).toBe('/workspace/a/b/c');
    expect(files.resolve('l/../b/./c', true)).toBe('/workspace/a/b/c');
    expect(files.resolve('up', true)).toBe('/');
    expect(files.resolve('../../../etc', true)).toBe('/etc');
    expect(files.resolve('l', false)).toBe('/workspace/l');
    expect(errno(() => files.resolve('l/c/d', true))).toBe('ENOTDIR');
    expect(errno(() => files.resolve('none/d', true))).toBe('ENOENT');
    files.set('/workspace/loop', link('loop'));
    expect(errno(() => files.resolve('loop', true))).toBe('ELOOP');
    expect(errno(() => files.resolve('x'.repeat(256), true))).toBe('ENAMETOOLONG');
  });

  test('are written below the workspace and /tmp only', () => {
    const files = tree();
    for (const path of ['/etc', '/dev/x', '/workspacer', '/'])
      expect(
        errno(() => files.set(path, file(''))),
        path,
      ).toBe('EROFS');
    expect(errno(() => files.set('/workspace', file('')))).toBe('EBUSY');
    files.set('/tmp/x', file('1'));
    expect(files.copy().at('/tmp/x')).toBeUndefined();
  });
});

describe('limits', () => {
  test('bytes are counted by what is there, whatever was done', () => {
    const files = tree();
    const before = files.bytes;
    files.set('/workspace/x', file('1'.repeat(100)));
    files.set('/workspace/x', file('1'.repeat(50)));
    expect(files.bytes).toBe(before + '/workspace/x'.length + 50);
    files.rename('/workspace/x', '/workspace/a/longer');
    files.remove('/workspace/a/longer', 'file');
    expect(files.bytes).toBe(before);
    files.rename('/workspace/a', '/workspace/z');
    files.rename('/workspace/z', '/workspace/a');
    expect(files.bytes).toBe(before);
    expect(errno(() => files.set('/workspace/x', file('1'.repeat(10_000))))).toBe('ENOSPC');
  });

  test('a file without a name counts until it is closed', () => {
    const files = tree();
    const before = files.bytes;
    const node = file('');
    files.set('/workspace/x', node);
    files.open(node);
    files.resize(node, 5000);
    files.remove('/workspace/x', 'file');
    expect(files.bytes).toBe(before + 5000);
    expect(errno(() => files.resize(node, 20_000))).toBe('ENOSPC');
    files.close(node);
    expect(files.bytes).toBe(before);
  });

  test('inodes', () => {
    const files = tree();
    let n = 0;
    expect(
      errno(() => {
        for (;;) files.set(`/workspace/${n++}`, file(''));
      }),
    ).toBe('ENOSPC');
    expect(files.inodes).toBe(LIMITS.inodes);
  });
});

test('growing shows zeros where a cut was', () => {
  const files = tree();
  const node = files.node('/workspace/a/b/c') as FileNode;
  files.resize(node, 100);
  node.data.fill(7);
  files.resize(node, 3);
  files.resize(node, 10);
  expect([...node.data]).toEqual([7, 7, 7, 0, 0, 0, 0, 0, 0, 0]);
});

test('directories: removed when empty, replaced by their like, never moved into themselves', () => {
  const files = tree();
  expect(errno(() => files.remove('/workspace/a', 'directory'))).toBe('ENOTEMPTY');
  expect(errno(() => files.remove('/workspace/a', 'file'))).toBe('EISDIR');
  expect(errno(() => files.rename('/workspace/a', '/workspace/a/b/d'))).toBe('EINVAL');
  files.set('/workspace/f', file('1'));
  expect(errno(() => files.rename('/workspace/a', '/workspace/f'))).toBe('ENOTDIR');
  expect(errno(() => files.rename('/workspace/f', '/workspace/a'))).toBe('EISDIR');
  files.makeDirectory('/workspace/e');
  files.rename('/workspace/a', '/workspace/e');
  expect(files.list('/workspace')).toEqual(['e', 'f']);
  expect(textAt(files, '/workspace/e/b/c')).toBe('text');
});

describe('changes', () => {
  test('carry any change over to a copy', () => {
    const from = tree();
    const to = from.copy();
    const node = from.node('/workspace/a/b/c') as FileNode;
    // The copy shares the content, as two processes never do.
    from.set('/workspace/a/b/c', { ...node, data: new Uint8Array(node.data) });
    from.rename('/workspace/a/b', '/workspace/moved');
    from.set('/workspace/a/new', file('n'));
    from.remove('/workspace/a/new', 'file');
    from.remove('/workspace/a', 'directory');
    from.set('/workspace/a', file('a file now'));
    const { put, removed } = from.takeChanges();
    to.apply(put, removed);
    expect(to.list('/workspace')).toEqual(['a', 'moved']);
    expect(textAt(to, '/workspace/a')).toBe('a file now');
    expect(textAt(to, '/workspace/moved/c')).toBe('text');
    expect([to.bytes, to.inodes]).toEqual([from.bytes, from.inodes]);
    expect(from.takeChanges()).toEqual({ put: [], removed: [] });
  });

  test.each<[string, [string, MemoryNode][], string[]]>([
    ['outside the workspace', [['/etc/passwd', file('')]], []],
    [
      'a directory where only the interpreter may',
      [['/dev', { kind: 'directory', mode: 0o755, modifiedMs: 0 }]],
      [],
    ],
    ['a path that is not canonical', [['/workspace/../etc', file('')]], []],
    [
      'through a link',
      [
        ['/workspace/l', link('/')],
        ['/workspace/l/x', file('')],
      ],
      [],
    ],
    ['below a file', [['/workspace/a/b/c/d', file('')]], []],
    ['without a parent', [['/workspace/n/d', file('')]], []],
    ['children left behind', [], ['/workspace/a/b']],
    ['a file over a full directory', [['/workspace/a', file('')]], []],
    ['more than the disk', [['/workspace/x', file('1'.repeat(20_000))]], []],
    ['the workspace itself', [], ['/workspace']],
  ])('that cannot be are refused: %s', (_, put, removed) => {
    expect(() => tree().apply(put, removed)).toThrow(FileFault);
  });
});
