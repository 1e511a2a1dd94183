import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { afterAll, describe, expect, test } from 'vitest';
import { type LayerId, probeBubblewrap, type Sandbox } from '../index.ts';
import { BubblewrapDriver } from './driver.ts';
import { findTools } from './tools.ts';

/**
 * Random sequences of file operations, snapshots, rollbacks and forks, held against plain directories that
 * cp keeps. A failure prints its seed: LONGHAUL_SEED=n runs that one alone, LONGHAUL_SEEDS=n that many.
 */

const home = mkdtempSync(join(tmpdir(), 'longhaul-layers-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const skipped = !probe.ok ? probe.reason : '';
const SEEDS = process.env.LONGHAUL_SEED
  ? [Number(process.env.LONGHAUL_SEED)]
  : Array.from({ length: Number(process.env.LONGHAUL_SEEDS ?? 2) }, (_, i) => i + 1);

afterAll(() => rmSync(home, { recursive: true, force: true }));

/**
 * Applied inside the sandbox and to the model alike. What overlays cannot keep is left out of it: a hard
 * link ends with the first change after a snapshot, so names that share a file are replaced, not changed.
 */
const APPLY = `
import errno, hashlib, json, os, shutil, stat, sys
def opener(path, flags): return os.open(path, flags | os.O_NONBLOCK) # a pipe would wait
def put(path, mode="w"): return open(path, mode, opener=opener)
def lone(p):
    if os.path.isfile(p) and not os.path.islink(p) and os.lstat(p).st_nlink > 1:
        shutil.copy2(p, p + ".lone"); os.rename(p + ".lone", p)
def step(op, a, b, n):
    if op == "write": 
        lone(a)
        with put(a) as f: f.write("%d\\n" % n * (n % 50))
    elif op == "append":
        lone(a)
        with put(a, "a") as f: f.write("more %d" % n)
    elif op == "sparse":
        lone(a)
        with put(a, "wb") as f: f.truncate(1 << 20); f.seek(n % 200 * 4096 + n % 7); f.write(b"x" * (n % 9000)); f.seek(700000); f.write(bytes(5000))
    elif op == "mkdir": os.mkdir(a)
    elif op == "tree":
        os.makedirs(a + "/x/y"); put(a + "/x/f").write(str(n)); put(a + "/x/y/g").write(str(-n))
    elif op == "remove": shutil.rmtree(a) if os.path.isdir(a) and not os.path.islink(a) else os.unlink(a)
    elif op == "again":
        if not os.path.isdir(a): return # rmtree would wait at a pipe
        shutil.rmtree(a); os.mkdir(a); put(a + "/only").write(str(n))
    elif op == "rename":
        if not (b + "/").startswith(a + "/"):
            for folder, _, names in os.walk(a):
                for name in names: lone(folder + "/" + name)
            lone(a)
            if os.path.isdir(a) and not os.path.islink(a) and os.path.lexists(b): return
            shutil.move(a, b) if RENAME == "move" else os.rename(a, b)
    elif op == "link": lone(a); os.link(a, b, follow_symlinks=False)
    elif op == "symlink": os.symlink(a, b)
    elif op == "fifo": os.mkfifo(b)
    elif op == "chmod":
        if not os.path.islink(a): lone(a); os.chmod(a, (0o700 if os.path.isdir(a) else 0o600) | n % 64)
    elif op == "touch":
        if not os.path.islink(a): lone(a); os.utime(a, ns=(1, n * 1000003))
def apply(root, steps):
    os.chdir(root)
    done = []
    for each in steps:
        try: step(*each); done.append(0)
        except OSError as e: done.append(e.errno)
    return done
def show(root):
    os.chdir(root)
    found, links = {}, {}
    def walk(p):
        i = os.lstat(p); kind = stat.S_IFMT(i.st_mode)
        text = "%o" % i.st_mode
        if stat.S_ISLNK(i.st_mode): text = "-> " + os.readlink(p)
        if stat.S_ISREG(i.st_mode):
            text += " %d %s" % (i.st_size, hashlib.sha256(open(p, "rb").read()).hexdigest()[:16])
            if i.st_mtime_ns < 10**12: text += " %d" % i.st_mtime_ns
            first = links.setdefault((i.st_dev, i.st_ino), p)
            if first != p: text += " = " + first
        found[p] = text
        if stat.S_ISDIR(i.st_mode):
            for n in sorted(os.listdir(p)): walk(p + "/" + n)
    walk(".")
    del found["."]
    return found
for line in sys.stdin:
    root, RENAME, steps = json.loads(line)
    print(json.dumps([apply(root, steps), show(root)]), flush=True)
`;

type Step = [op: string, a: string, b: string, n: number];
type Seen = [errors: number[], tree: Record<string, string>];

/** Mulberry32: a small generator whose sequence a seed fixes. */
function generator(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) % below;
  };
}

class Walk {
  readonly random: (below: number) => number;
  readonly #dir: string;
  readonly #rename: string;
  readonly #python: ChildProcess;
  readonly #lines: AsyncIterator<string>;
  #copies = 0;

  constructor(seed: number, dir: string, rename: string) {
    this.random = generator(seed);
    this.#dir = dir;
    this.#rename = rename;
    mkdirSync(dir, { recursive: true });
    const stdio = ['pipe' as const, 'pipe' as const, 'inherit' as const];
    this.#python = spawn(findTools().python, ['-I', '-c', APPLY], { stdio });
    this.#lines = createInterface({ input: this.#python.stdout! })[Symbol.asyncIterator]();
  }

  end(): void {
    this.#python.kill();
  }

  steps(): Step[] {
    const kinds =
      'write write append sparse mkdir tree tree remove remove again again rename rename';
    const all = `${kinds} rename link symlink fifo chmod chmod touch`.split(' ');
    const name = () => {
      const depth = 1 + this.random(3);
      return Array.from({ length: depth }, () => 'abcxyfg'[this.random(7)]).join('/');
    };
    return Array.from({ length: 1 + this.random(6) }, () => [
      all[this.random(all.length)]!,
      name(),
      name(),
      this.random(1_000_000),
    ]);
  }

  async model(root: string, steps: Step[]): Promise<Seen> {
    this.#python.stdin!.write(`${JSON.stringify([root, this.#rename, steps])}\n`);
    return JSON.parse((await this.#lines.next()).value);
  }

  async inside(sandbox: Sandbox, steps: Step[]): Promise<Seen> {
    const stdin = JSON.stringify(['/workspace', this.#rename, steps]);
    const [result] = await sandbox.runCode([{ language: 'python', source: APPLY, stdin }]);
    if (result!.code !== 0) throw new Error(result!.stderr);
    return JSON.parse(result!.stdout);
  }

  empty(): string {
    const path = join(this.#dir, `model${this.#copies++}`);
    mkdirSync(path);
    return path;
  }

  copy(model: string): string {
    const path = join(this.#dir, `model${this.#copies++}`);
    execFileSync('cp', ['-a', model, path]);
    return path;
  }
}

describe.skipIf(skipped !== '')(
  `layers against a plain directory${skipped && ` (skipped: ${skipped})`}`,
  () => {
    test.each(SEEDS)('seed %i', async (seed) => {
      const dir = join(home, `seed${seed}`);
      const walk = new Walk(
        seed,
        join(dir, 'models'),
        process.getuid?.() === 0 ? 'rename' : 'move',
      );
      let driver = await BubblewrapDriver.open({ dir: join(dir, 'driver'), warm: 0 });
      try {
        let sandbox = await driver.create();
        let model = walk.empty();
        const saved: { layer: LayerId; model: string; durable: boolean }[] = [];
        const trail: string[] = [];
        for (let round = 0; round < 110; round++) {
          const steps = walk.steps();
          const was = await walk.model(model, steps);
          expect(await walk.inside(sandbox, steps), `seed ${seed}: ${trail.join(' ')}`).toEqual(
            was,
          );
          const choice = walk.random(20);
          if (choice < 15) {
            // Mostly one kind in a stretch, so that both grow deep stacks.
            const durable = (round >> 5) % 2 === 1 ? choice < 13 : choice < 1;
            const layer = await sandbox.snapshot({ durable });
            saved.push({ layer, model: walk.copy(model), durable });
            trail.push(durable ? 'durable' : 'volatile');
          } else if (choice < 17 && saved.length > 0) {
            const to = saved[Math.max(0, saved.length - 1 - walk.random(12))]!;
            await sandbox.rollback(to.layer);
            model = walk.copy(to.model);
            trail.push(`rollback(${to.layer.slice(0, 6)})`);
          } else if (choice < 19) {
            const [child] = await sandbox.fork(1);
            await sandbox.stop();
            sandbox = child!;
            trail.push('fork');
          } else if (saved.length > 10) {
            const [gone] = saved.splice(walk.random(saved.length - 1), 1);
            await driver.dropLayer(gone!.layer);
            trail.push(`drop(${gone!.layer.slice(0, 6)})`);
          }
          expect((await walk.inside(sandbox, []))[1], `seed ${seed}: ${trail.join(' ')}`).toEqual(
            (await walk.model(model, []))[1],
          );
        }
        for (const { layer, model: kept } of saved.slice(-8)) {
          await sandbox.rollback(layer);
          expect((await walk.inside(sandbox, []))[1], `seed ${seed} ${layer}`).toEqual(
            (await walk.model(kept, []))[1],
          );
        }
        await driver.close();
        driver = await BubblewrapDriver.open({ dir: join(dir, 'driver'), warm: 0 });
        for await (const report of driver.verifyLayers({ full: true }))
          expect(report, `seed ${seed}`).toMatchObject({ state: 'whole' });
        for (const { layer, model: kept } of saved.filter((each) => each.durable).slice(-4)) {
          const resumed = await driver.create({}, layer);
          expect((await walk.inside(resumed, []))[1], `seed ${seed} ${layer}`).toEqual(
            (await walk.model(kept, []))[1],
          );
          await resumed.stop();
        }
      } finally {
        walk.end();
        await driver.close();
        rmSync(dir, { recursive: true, force: true });
      }
    });
  },
);
