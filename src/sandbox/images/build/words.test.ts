// biome-ignore-all lint/suspicious/noTemplateCurlyInString: they are what is tested
import { describe, expect, test } from 'vitest';
import { parseDockerfile } from './dockerfile.ts';
import { dockerignore, globPattern } from './glob.ts';
import { expandWord, expandWords, rawWords } from './words.ts';

const KNOWN = { A: 'a', B: 'x y', EMPTY: '', EVIL: '$A "q" \'s\' `id` $(id); \\' };

describe('words of a Dockerfile', () => {
  test.each([
    ['plain', 'plain'],
    ['$A', 'a'],
    ['${A}b', 'ab'],
    ['$AB', ''],
    ['\\$A', '$A'],
    ["'$A'", '$A'],
    ['"$A"', 'a'],
    ['"\\$A \\" \\n"', '$A " \\n'],
    ['a\\ b', 'a b'],
    ['${NO:-d}', 'd'],
    ['${NO:-$A}', 'a'],
    ['${NO-d}', 'd'],
    ['${EMPTY:-d}', 'd'],
    ['${EMPTY-d}', ''],
    ['${A:+yes}', 'yes'],
    ['${EMPTY:+yes}', ''],
    ['${EMPTY+yes}', 'yes'],
    ['${A:-${B}}', 'a'],
    ['${NO:-${B}}', 'x y'],
    ['$', '$'],
    ['a$', 'a$'],
    ['$1', '$1'],
    // What a variable stands for is never read again.
    ['$EVIL', KNOWN.EVIL],
    ['"$EVIL"', KNOWN.EVIL],
    ['${__proto__}${constructor}$toString', ''],
  ])('%s is %j', (text, expected) => {
    expect(expandWord(text, KNOWN)).toBe(expected);
  });

  test('a value with blanks stays one word, quotes group, blanks separate', () => {
    expect(expandWords('$B "c d"  \'e\'f\\ g', KNOWN)).toEqual(['x y', 'c d', 'ef g']);
    expect(expandWords('""', KNOWN)).toEqual(['']);
    expect(rawWords('A="x y" B=\'$A\' C=\\ d')).toEqual(['A="x y"', "B='$A'", 'C=\\ d']);
    expect(expandWord('a`$A', KNOWN, '`')).toBe('a$A');
  });

  test.each(['"a', "'a", '${A', '${}', '${A#x}', '${A:?no}x${NO:?gone}', '${-x}'])(
    '%s has an error',
    (text) => {
      expect(() => expandWord(text, KNOWN)).toThrow();
    },
  );
});

describe('patterns', () => {
  test.each([
    ['*.txt', 'a.txt', true],
    ['*.txt', 'd/a.txt', false],
    ['**/*.txt', 'd/e/a.txt', true],
    ['**/*.txt', 'a.txt', true],
    ['d/**', 'd/e/f', true],
    ['?', 'ab', false],
    ['[a-c]x', 'bx', true],
    ['[^a-c]x', 'bx', false],
    ['[^a]x', '/x', false],
    ['a.c', 'abc', false],
    ['a\\*', 'a*', true],
    ['a\\*', 'ab', false],
    ['(a|b)+', '(a|b)+', true],
    ['(a|b)+', 'a', false],
    ['[\\]]', ']', true],
    ['*', 'a\nb', true],
  ])('%j on %j: %j', (pattern, path, expected) => {
    expect(globPattern(pattern).test(path)).toBe(expected);
  });

  test('the last pattern of a .dockerignore that matches decides', () => {
    const { ignored, exceptions } = dockerignore(
      '# note\n\nlogs\n*.tmp\n!keep.tmp\n/a/b\n**/node_modules\n',
    );
    expect(exceptions).toBe(true);
    const all = [
      'logs',
      'logs/x/y',
      'x/logs',
      'a.tmp',
      'keep.tmp',
      'a/b/c',
      'b',
      'q/node_modules/z',
    ];
    expect(all.filter((path) => ignored(path))).toEqual([
      'logs',
      'logs/x/y',
      'a.tmp',
      'a/b/c',
      'q/node_modules/z',
    ]);
  });
});

describe('instructions of a Dockerfile', () => {
  test('continuations, comments between, flags, case, CRLF', () => {
    const { instructions } = parseDockerfile(
      '# escape=\\\r\n\r\nfrom x as y\r\n  # c\r\nRUN a \\\r\n  # c\r\n\r\n  b && \\  \r\n  c\r\nCOPY --from=y --chmod=755 a b\r\n',
    );
    expect(instructions.map(({ line, keyword, rest }) => [line, keyword, rest])).toEqual([
      [3, 'FROM', 'x as y'],
      [5, 'RUN', 'a   b &&   c'],
      [10, 'COPY', 'a b'],
    ]);
    expect([...instructions[2]!.flags]).toEqual([
      ['from', 'y'],
      ['chmod', '755'],
    ]);
  });

  test('heredocs keep their lines, strip tabs where asked, and are none in quotes', () => {
    const { instructions } = parseDockerfile(
      'RUN cat <<A >x && cat <<-"B"\n$a \\\n# no comment\nA\n\tb\n\tB\nRUN echo "<<C"\nRUN x\n',
    );
    expect(instructions.map((each) => each.heredocs)).toEqual([
      [
        { name: 'A', content: '$a \\\n# no comment\n', expand: true },
        { name: 'B', content: 'b\n', expand: false },
      ],
      [],
      [],
    ]);
  });

  test.each([
    ['FROM x\n"FROM" y', /line 2/],
    ['FROM x\n\nRUN <<EOF\na', /line 3: the heredoc EOF has no end/],
    ['# escape=x\nFROM y', /escape=x/],
  ])('%j is refused', (text, message) => {
    expect(() => parseDockerfile(text)).toThrow(message);
  });
});
