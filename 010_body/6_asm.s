
/tmp/tmpfamwzd2c.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_body>:
   0:	push   %rbp
   1:	push   %r15
   3:	push   %r14
   5:	push   %r13
   7:	push   %r12
   9:	push   %rbx
   a:	sub    $0x28,%rsp
   e:	movabs $0x0,%rax
  18:	movabs $0x0,%r15
  22:	mov    %r8,0x18(%rsp)
  27:	mov    %rcx,%rbp
  2a:	mov    %rdx,%r13
  2d:	mov    %rsi,0x10(%rsp)
  32:	mov    %rdi,0x20(%rsp)
  37:	vmovss (%rax),%xmm0
  3b:	vmovss %xmm0,0x4(%rsp)
  41:	jmp    6f <k0_body+0x6f>
  43:	data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  50:	mov    0x8(%rsp),%rdx
  55:	mov    0x10(%rsp),%rax
  5a:	movl   $0x8,0x0(%r13)
  62:	inc    %rbp
  65:	vmovups (%rdi,%rdx,4),%ymm0
  6a:	vmovups %ymm0,(%rax,%rdx,4)
  6f:	cmp    0x18(%rsp),%rbp
  74:	jge    126 <k0_body+0x126>
  7a:	lea    0x0(,%rbp,8),%rax
  82:	xor    %ebx,%ebx
  84:	mov    %rax,0x8(%rsp)
  89:	jmp    93 <k0_body+0x93>
  8b:	nopl   0x0(%rax,%rax,1)
  90:	inc    %rbx
  93:	cmp    $0x7,%rbx
  97:	jg     50 <k0_body+0x50>
  99:	cmp    $0x7,%ebx
  9c:	mov    $0x7,%eax
  a1:	vmovss 0x4(%rsp),%xmm1
  a7:	cmovl  %ebx,%eax
  aa:	cltq
  ac:	add    0x8(%rsp),%rax
  b1:	vmovss (%rdi,%rax,4),%xmm0
  b6:	vucomiss %xmm1,%xmm0
  ba:	vcmpeqss %xmm1,%xmm0,%k0
  c1:	kmovw  %k0,%edx
  c5:	mov    %edx,0x0(%r13)
  c9:	jne    90 <k0_body+0x90>
  cb:	jp     90 <k0_body+0x90>
  cd:	vmovss (%rdi,%rax,4),%xmm0
  d2:	lea    0xc0(%r13),%rdx
  d9:	lea    0x80(%r13),%r14
  e0:	lea    0x40(%r13),%r12
  e4:	mov    $0x7,%edi
  e9:	xor    %esi,%esi
  eb:	vmovss %xmm0,(%rdx)
  ef:	mov    %ebx,(%r14)
  f2:	mov    %ebp,(%r12)
  f6:	vzeroupper
  f9:	call   *%r15
  fc:	mov    $0x7,%edi
 101:	mov    $0x1,%esi
 106:	mov    %r14,%rdx
 109:	call   *%r15
 10c:	mov    $0x7,%edi
 111:	mov    $0x2,%esi
 116:	mov    %r12,%rdx
 119:	call   *%r15
 11c:	mov    0x20(%rsp),%rdi
 121:	jmp    90 <k0_body+0x90>
 126:	add    $0x28,%rsp
 12a:	pop    %rbx
 12b:	pop    %r12
 12d:	pop    %r13
 12f:	pop    %r14
 131:	pop    %r15
 133:	pop    %rbp
 134:	vzeroupper
 137:	ret
 138:	nopl   0x0(%rax,%rax,1)

0000000000000140 <pbk_task0>:
 140:	push   %rax
 141:	shl    $0x8,%rcx
 145:	mov    %rsi,%rax
 148:	mov    (%rdi),%r10
 14b:	mov    0x8(%rdi),%rsi
 14f:	add    0x10(%rdi),%rcx
 153:	movabs $0x0,%r9
 15d:	mov    %rdx,%r8
 160:	mov    %rcx,%rdx
 163:	mov    %r10,%rdi
 166:	mov    %rax,%rcx
 169:	call   *%r9
 16c:	pop    %rax
 16d:	ret
 16e:	xchg   %ax,%ax

0000000000000170 <pbk_main>:
 170:	sub    $0x18,%rsp
 174:	vmovups (%rsi),%xmm0
 178:	movabs $0x0,%rax
 182:	mov    %rsp,%rdi
 185:	xor    %esi,%esi
 187:	xor    %ecx,%ecx
 189:	vmovups %xmm0,(%rsp)
 18e:	mov    %rdx,0x10(%rsp)
 193:	mov    $0x4,%edx
 198:	call   *%rax
 19a:	add    $0x18,%rsp
 19e:	ret
 19f:	nop

00000000000001a0 <pbk_run>:
 1a0:	push   %r15
 1a2:	push   %r14
 1a4:	push   %r13
 1a6:	push   %r12
 1a8:	push   %rbx
 1a9:	sub    $0x10,%rsp
 1ad:	mov    %rsi,%rbx
 1b0:	movabs $0x0,%r15
 1ba:	movabs $0x0,%rax
 1c4:	lea    0x8(%rsp),%rcx
 1c9:	mov    $0x1000,%esi
 1ce:	mov    $0x1000,%edx
 1d3:	mov    %rdi,%r14
 1d6:	mov    %r15,%rdi
 1d9:	call   *%rax
 1db:	mov    0x8(%rsp),%r13
 1e0:	mov    %rax,%r12
 1e3:	movabs $0x0,%rax
 1ed:	mov    %r14,%rdi
 1f0:	mov    %rbx,%rsi
 1f3:	mov    %r13,%rdx
 1f6:	call   *%rax
 1f8:	movabs $0x0,%rax
 202:	mov    %r15,%rdi
 205:	mov    %r13,%rsi
 208:	mov    %r12,%rdx
 20b:	call   *%rax
 20d:	add    $0x10,%rsp
 211:	pop    %rbx
 212:	pop    %r12
 214:	pop    %r13
 216:	pop    %r14
 218:	pop    %r15
 21a:	ret
 21b:	nopl   0x0(%rax,%rax,1)

0000000000000220 <pbk_call>:
 220:	push   %rax
 221:	movabs $0x0,%rax
 22b:	mov    %rdi,%rsi
 22e:	xor    %edi,%edi
 230:	call   *%rax
 232:	pop    %rax
 233:	ret
 234:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000240 <pbk_handler>:
 240:	mov    0x8(%rdi),%rax
 244:	test   %rax,%rax
 247:	je     278 <pbk_handler+0x38>
 249:	cmpl   $0x1,0x8(%rax)
 24d:	sete   %cl
 250:	test   %cl,%cl
 252:	je     27e <pbk_handler+0x3e>
 254:	mov    0x18(%rax),%rax
 258:	movabs $0x300000000,%rcx
 262:	mov    %rcx,0x18(%rax)
 266:	movl   $0x0,0x20(%rax)
 26d:	movq   $0x0,0x28(%rax)
 275:	xor    %eax,%eax
 277:	ret
 278:	xor    %ecx,%ecx
 27a:	test   %cl,%cl
 27c:	jne    254 <pbk_handler+0x14>
 27e:	sub    $0x18,%rsp
 282:	mov    0x48(%rdi),%rax
 286:	mov    0x70(%rdi),%rcx
 28a:	lea    0x8(%rsp),%rsi
 28f:	mov    (%rax),%rax
 292:	mov    0x18(%rax),%rax
 296:	mov    %rax,0x8(%rsp)
 29b:	mov    (%rcx),%rax
 29e:	mov    0x18(%rax),%rax
 2a2:	mov    %rax,0x10(%rsp)
 2a7:	movabs $0x0,%rax
 2b1:	call   *%rax
 2b3:	add    $0x18,%rsp
 2b7:	xor    %eax,%eax
 2b9:	ret
 2ba:	nopw   0x0(%rax,%rax,1)

00000000000002c0 <_mlir_k0_body>:
 2c0:	push   %rax
 2c1:	mov    (%rdi),%rax
 2c4:	mov    0x10(%rdi),%rdx
 2c8:	mov    0x8(%rdi),%rcx
 2cc:	mov    0x18(%rdi),%r8
 2d0:	mov    0x20(%rdi),%rdi
 2d4:	movabs $0x0,%r9
 2de:	mov    (%rcx),%rsi
 2e1:	mov    (%r8),%rcx
 2e4:	mov    (%rax),%rax
 2e7:	mov    (%rdi),%r8
 2ea:	mov    (%rdx),%rdx
 2ed:	mov    %rax,%rdi
 2f0:	call   *%r9
 2f3:	pop    %rax
 2f4:	ret
 2f5:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000300 <_mlir_pbk_task0>:
 300:	push   %rax
 301:	mov    (%rdi),%rax
 304:	mov    0x10(%rdi),%rdx
 308:	mov    0x8(%rdi),%rcx
 30c:	mov    0x18(%rdi),%rdi
 310:	movabs $0x0,%r8
 31a:	mov    (%rcx),%rsi
 31d:	mov    (%rax),%rax
 320:	mov    (%rdi),%rcx
 323:	mov    (%rdx),%rdx
 326:	mov    %rax,%rdi
 329:	call   *%r8
 32c:	pop    %rax
 32d:	ret
 32e:	xchg   %ax,%ax

0000000000000330 <_mlir_pbk_main>:
 330:	push   %rax
 331:	mov    (%rdi),%rax
 334:	mov    0x10(%rdi),%rdx
 338:	mov    0x8(%rdi),%rcx
 33c:	mov    (%rax),%rax
 33f:	mov    (%rcx),%rsi
 342:	mov    (%rdx),%rdx
 345:	movabs $0x0,%rcx
 34f:	mov    %rax,%rdi
 352:	call   *%rcx
 354:	pop    %rax
 355:	ret
 356:	cs nopw 0x0(%rax,%rax,1)

0000000000000360 <_mlir_pbk_run>:
 360:	push   %rax
 361:	mov    0x8(%rdi),%rcx
 365:	mov    (%rdi),%rax
 368:	mov    (%rax),%rdi
 36b:	mov    (%rcx),%rsi
 36e:	movabs $0x0,%rax
 378:	call   *%rax
 37a:	pop    %rax
 37b:	ret
 37c:	nopl   0x0(%rax)

0000000000000380 <_mlir_pbk_call>:
 380:	push   %rax
 381:	mov    (%rdi),%rax
 384:	mov    (%rax),%rdi
 387:	movabs $0x0,%rax
 391:	call   *%rax
 393:	pop    %rax
 394:	ret
 395:	data16 cs nopw 0x0(%rax,%rax,1)

00000000000003a0 <_mlir_pbk_handler>:
 3a0:	push   %rbx
 3a1:	mov    (%rdi),%rax
 3a4:	mov    %rdi,%rbx
 3a7:	mov    (%rax),%rdi
 3aa:	movabs $0x0,%rax
 3b4:	call   *%rax
 3b6:	mov    0x8(%rbx),%rcx
 3ba:	mov    %rax,(%rcx)
 3bd:	pop    %rbx
 3be:	ret

