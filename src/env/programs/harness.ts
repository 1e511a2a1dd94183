import type { CodeRequest, ExecResult } from '../../core/index.ts';
import type { Case } from './cases.ts';
import type { Language, Value } from './operations.ts';
import type { CaseResult } from './verdict.ts';

/** CPU time a program may use for all its cases together: endless ones end by the kernel's timer. */
const CPU_SECONDS = 0.3;
/** Wall-clock limit, for programs that disarm the timer or sleep; in WebAssembly there is no other. */
const WALL_MS: Record<Language, number> = { python: 3000, javascript: 1000 };

/**
 * The request that evaluates one program on the inputs of all cases, in a process of its own. Inputs go
 * in, values come out; expected values stay here, so nothing a program prints or patches can make it
 * right: an output that passes is a right output, however it was made.
 */
export function codeRequest(
  language: Language,
  program: string,
  cases: readonly Case[],
): CodeRequest {
  const inputs = cases.map((item) => item.input);
  return {
    language,
    source: language === 'python' ? pythonSource(program, inputs) : scriptSource(program, inputs),
    timeoutMs: WALL_MS[language],
  };
}

/** JSON of plain strings and integers is a literal in both languages. */
const literal = (value: unknown) => JSON.stringify(value);

/**
 * Standard output is moved away while the program runs, so its prints are lost. Strings come out as
 * hexadecimal UTF-8. Nothing is imported that the interpreter has not loaded already or built in. In
 * WebAssembly there is no moving of descriptors and no timer: there the streams are replaced, and the
 * sandbox's own limits on time and memory are the only ones.
 */
function pythonSource(program: string, inputs: readonly Value[]): string {
  return `import os, signal, sys
def main(exact=type, compile=compile, eval=eval, str=str, int=int, list=list, repr=repr, all=all, write=os.write):
    out = 1
    if sys.platform == 'wasi':
        sys.stdout = sys.stderr = open('/dev/null', 'w')
    else:
        out = os.dup(1)
        null = os.open('/dev/null', os.O_RDWR)
        os.dup2(null, 0); os.dup2(null, 1); os.dup2(null, 2)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, ${CPU_SECONDS})
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    except Exception:
        pass
    def plain(v):
        if exact(v) is str:
            return '{"s":"' + v[:4096].encode('utf-8', 'replace').hex() + '"}'
        if exact(v) is int:
            return '{"i":' + repr(v) + '}' if -(1 << 53) < v < 1 << 53 else '{"e":"Large"}'
        if exact(v) is list and len(v) < 1000 and all(exact(i) is int and -(1 << 53) < i < 1 << 53 for i in v):
            return '{"l":' + repr(v) + '}'
        return '{"e":"Type"}'
    results = []
    try:
        code = compile(${literal(program)}, 'program', 'eval')
        for x in ${literal(inputs)}:
            try:
                results.append(plain(eval(code, {'x': x})))
            except Exception as error:
                results.append('{"e":"' + ''.join(c for c in exact(error).__name__.replace('Error', '') if c.isalpha())[:12] + '"}')
    except Exception as error:
        results = ['{"e":"Syntax"}']
    write(out, ('[' + ','.join(results) + ']').encode())
main()
`;
}

/**
 * The same for QuickJS. The program shares a realm with this code; patched built-ins can only spoil
 * its own answer, and what was needed of them is taken before.
 */
function scriptSource(program: string, inputs: readonly Value[]): string {
  return `(() => {
const print = globalThis.print ?? console.log.bind(console), text = JSON.stringify, isArray = Array.isArray, isInt = Number.isSafeInteger;
const hex = (s) => { let out = ''; for (let i = 0; i < s.length && i < 4096; i++) { const c = s.charCodeAt(i); out += c < 128 ? (c < 16 ? '0' : '') + c.toString(16) : '3f'; } return out; };
const plain = (v) => typeof v === 'string' ? '{"s":"' + hex(v) + '"}' : isInt(v) ? '{"i":' + (v === 0 ? 0 : v) + '}' :
  isArray(v) && v.length < 1000 && v.every(isInt) ? '{"l":' + text(v.map((i) => i === 0 ? 0 : i)) + '}' : '{"e":"Type"}';
const kind = (e) => { try { return String(e.name).replace('Error', '').replace(/[^A-Za-z]/g, '').slice(0, 12); } catch { return 'Error'; } };
globalThis.print = () => {}; if (typeof console === 'object') console.log = () => {};
let results = [];
try {
  const run = new Function('x', 'return (' + ${literal(program)} + '\\n)');
  for (const x of ${literal(inputs)}) { try { results.push(plain(run(x))); } catch (e) { results.push('{"e":"' + kind(e) + '"}'); } }
} catch (e) { results = ['{"e":"Syntax"}']; }
print('[' + results.join(',') + ']');
})();
`;
}

/** What a process gave: a result a case, or one error for the whole program. Its output is hostile. */
export function readResults(result: ExecResult): CaseResult[] {
  switch (result.cause) {
    case 'timeout':
      return [{ error: 'Time' }];
    case 'out_of_memory':
      return [{ error: 'Memory' }];
    case 'output_limit':
      return [{ error: 'Output' }];
    case 'signalled':
      return [{ error: result.signal === 'SIGVTALRM' ? 'Time' : 'Killed' }];
    case 'exited':
      break;
  }
  if (result.code !== 0) return [{ error: 'Exit' }];
  let parsed: unknown;
  try {
    parsed = JSON.parse(result.stdout);
  } catch {
    return [{ error: 'Output' }];
  }
  return Array.isArray(parsed) ? parsed.map(readResult) : [{ error: 'Output' }];
}

function readResult(item: unknown): CaseResult {
  if (item !== null && typeof item === 'object') {
    if ('i' in item && Number.isSafeInteger(item.i)) return { value: item.i as number };
    if ('l' in item && Array.isArray(item.l) && item.l.every(Number.isSafeInteger))
      return { value: item.l as number[] };
    if ('s' in item && typeof item.s === 'string')
      return { value: Buffer.from(item.s, 'hex').toString('utf8') };
    if ('e' in item && typeof item.e === 'string') return { error: item.e };
  }
  return { error: 'Output' };
}
